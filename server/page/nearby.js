/** Work on elements that waits until they come near the screen: a long answer costs what is seen of it. */

const NEAR = "100% 0%"; // of the screen's height, above and below it
const acts = new WeakMap();
const observer = new IntersectionObserver((entries) => entries.filter(({ isIntersecting }) => isIntersecting).forEach(begin), {
  rootMargin: NEAR,
  scrollMargin: NEAR,
});

/** Do something with an element, once. @param {Element} element @param {() => void} act */
export function whenNear(element, act) {
  acts.set(element, act);
  observer.observe(element);
}

function begin({ target }) {
  observer.unobserve(target);
  acts.get(target)();
}
