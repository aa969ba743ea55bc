/** Files that the reader drops on the page, as documents. */

const MOST_BYTES = 4 << 20;

/**
 * Read files as text. Their names become their ids; the same name with another text gets a number.
 * @param {Iterable<File>} files
 * @param {{id: string, text: string}[]} known  the documents of the chat so far
 * @returns {Promise<{documents: {id: string, title: string, text: string}[], refused: string[]}>} refused: why, in words
 */
export async function readFiles(files, known) {
  const documents = [];
  const refused = [];
  for (const file of files) {
    const text = await textOf(file);
    if (text.problem) {
      refused.push(`${file.name} ${text.problem}`);
      continue;
    }
    const { name } = file;
    const id = freeId(name, text.content, [...known, ...documents]);
    if (documents.every((other) => other.id !== id)) documents.push({ id, title: name, text: text.content });
  }
  return { documents, refused };
}

async function textOf(file) {
  if (file.size > MOST_BYTES) return { problem: "is larger than 4 MiB." };
  try {
    const content = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (content.includes("\0")) return { problem: "is not text." };
    return content.trim() ? { content } : { problem: "is empty." };
  } catch {
    return { problem: "is not text in UTF-8." };
  }
}

function freeId(name, text, known) {
  const stem = name.replace(/\.[^.]+$/, "").replace(/[[\]\s]+/g, "-").slice(0, 60) || "document";
  for (let number = 1; ; number += 1) {
    const id = number === 1 ? stem : `${stem}-${number}`;
    const other = known.find((document) => document.id === id);
    if (!other || other.text === text) return id;
  }
}

/**
 * Take files that are dropped anywhere on the page.
 * @param {(files: FileList) => void} take
 */
export function acceptDrops(take) {
  const isFiles = (event) => event.dataTransfer?.types.includes("Files");
  addEventListener("dragover", (event) => {
    if (!isFiles(event)) return;
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) document.body.classList.remove("dropping");
  });
  addEventListener("drop", (event) => {
    if (!isFiles(event)) return;
    event.preventDefault();
    document.body.classList.remove("dropping");
    take(event.dataTransfer.files);
  });
}
