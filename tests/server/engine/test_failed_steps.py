"""A step that fails, or that does not end: what is kept, who is answered, and what /health says."""

import gc
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from slotcache.models.demo import FILE
from slotcache.models.errors import RunnerError
from slotcache.models.runner import Runner, States
from slotcache.server.engine import engine as engines
from slotcache.server.engine.generation import Generation
from slotcache.server.http.api_errors import RequestError
from slotcache.slots.radix import descendants, path
from support.architectures import hybrid, recurrent

from server.conftest import DEADLINE, blocked, running, text_of, until
from server.engine.test_engine import CHAT, LONG, Stream

DOCUMENTS = "The departure time of the express to the northern harbour is seven forty, and it is late in winter. " * 4
POISON = 7  # max_tokens of a request with which each step fails


def question(number, turn):
    return f"Question {number}: what of turn {turn} on the train? " * 16


def turn(server, number, messages, **fields):
    """Ask the next question of a conversation; the messages up to its answer, and the answer."""
    messages = messages or [{"role": "system", "content": DOCUMENTS}]
    messages = [*messages, {"role": "user", "content": question(number, len(messages))}]
    answer = server.chat(messages=messages, **fields)
    return [*messages, answer["choices"][0]["message"]], answer


def fail(engine, monkeypatch, when, times=1, share=1.0):
    """Let steps fail whose requests `when` says: behind a share of their operations. The list of such steps."""
    run, failed = engine.runner.run, []

    def broken(plan, samplers):
        jobs = {job.request.id: job for job in engine.scheduler.running}
        spans = [jobs[span.request] for span in plan.spans]
        if len(failed) < times and any(map(when, spans)):
            failed.append([job.request.id for job in engine.scheduler.running])
            for operation in plan.operations[: int(share * len(plan.operations))]:
                engine.runner.apply(operation)
            raise RunnerError("injected")
        return run(plan, samplers)

    monkeypatch.setattr(engine.runner, "run", broken)
    return failed


def are_copied(engine):
    """Whether all idle KV has a copy in host memory, as some idle time makes it."""
    tree, states = engine.scheduler.tree, engine.scheduler.trees[1:]

    def question():
        runs = {node for sequence in tree.device.idle.values() for node in path(sequence.last_node) if tree.host.max_bytes}
        runs |= {node for one in states for root in one.roots.values() for node in descendants(root)}
        return bool(runs) and all(node.copy is not None and node.copy.data is not None for node in runs)

    return engine.inbox.ask(question).result(DEADLINE)


def lose_choices(engine, monkeypatch, when=lambda spans: True):
    """Have what the samplers choose be lost once, when it is so. Returns how they choose afterwards."""
    runner = engine.runner
    sample = runner._sample

    def broken(spans, samplers):
        found = sample(spans, samplers)
        if when(spans):
            monkeypatch.setattr(runner, "_sample", sample)
            raise MemoryError
        return found

    monkeypatch.setattr(runner, "_sample", broken)
    return sample


def is_poison(job):
    return job.request.limit == POISON


MOST = 32  # tokens of an answer of a sentence
RIVERS = {
    "Tarnwick": "Ennick", "Oldhaven": "Morrow", "Skarrow": "Tellan", "Brennick": "Ashwater",
    "Calder": "Vennet", "Dunmere": "Larrow", "Eastmoor": "Pellow", "Farwell": "Quenby",
}  # fmt: skip


def about(town):
    """Ask the built-in model for a sentence of one of two documents. Each of its tokens is by 2.8 in its logarithm more
    probable than the next one: how the rows of a batch round (0.05) chooses none.
    """
    towns = list(RIVERS)
    shown = (town, towns[towns.index(town) - 3])
    texts = {one: f"The river of {one} is {RIVERS[one]}. The mayor of {one} is Ilse {RIVERS[one]}." for one in shown}
    documents = [{"id": one, "text": text} for one, text in texts.items()]
    body = {"messages": [{"role": "user", "content": f"What is the river of {town}?"}], "documents": documents}
    return body | {"max_tokens": MOST, "ignore_eos": False}


@pytest.mark.parametrize(
    ("generate", "share", "count"), [(None, 0.0, 20), (None, 1.0, 5), (hybrid, 1.0, 5), (recurrent, 0.5, 4)]
)
def test_conversations_that_were_idle_go_on_from_their_copies_to_the_bit(
    tiny, tmp_path, monkeypatch, generate, share, count
):
    """Of idle conversations, each reuses at least 0.95 of what it would have reused, and answers the same."""
    model = generate(tmp_path / "model.gguf") if generate else tiny
    with running(model, failed_steps=1, is_timed=False, ctx_size=16384) as server:
        engine = server.service.engine
        first = [turn(server, number, [])[0] for number in range(count)]
        until(lambda: are_copied(engine))
        usual = [turn(server, number, messages)[1] for number, messages in enumerate(first)]
        until(lambda: are_copied(engine))
        server.http.delete("/v1/cache")
        first = [turn(server, number, [])[0] for number in range(count)]
        until(lambda: are_copied(engine))
        fail(engine, monkeypatch, is_poison, share=share)
        assert server.chat("Something else", max_tokens=POISON)["usage"]["completion_tokens"] == POISON
        later = [turn(server, number, messages)[1] for number, messages in enumerate(first)]
        for one, other in zip(later, usual, strict=True):
            assert one["choices"][0]["message"] == other["choices"][0]["message"]
            assert one["timings"]["cache_n"] >= 0.95 * other["timings"]["cache_n"] > 300


def test_streams_go_on_where_a_step_failed(monkeypatch):
    """Six in mid-answer, and one that has no token yet: nobody sees more than a pause."""
    with running(FILE, failed_steps=1, parallel=7) as server:
        engine, towns = server.service.engine, [*RIVERS][:6]

        def all_are_in_mid_answer(job):
            return sum(one.num_generated > 2 for one in engine.scheduler.running) == 6

        failed = fail(engine, monkeypatch, all_are_in_mid_answer)
        with blocked(server):
            streams = [Stream(server, {"stream": True, "temperature": 0, **about(town)}) for town in towns]
            until(lambda: len(server.service.open) == 6)
        assert [stream.text for stream in streams] == [f"The river of {town} is {RIVERS[town]}." for town in towns]
        assert all(len(stream.finals) == 1 and "error" not in stream.finals[0] for stream in streams)
        assert len(failed[0]) == 6 and server.metric("slotcache_failed_steps_total") == 1
        assert server.metric("slotcache_preemptions_total") >= 6
        assert not server.metric("slotcache_restarted_requests_total")


def test_requests_without_a_token_run_again_beside_a_stream_that_goes_on(monkeypatch):
    with running(FILE, failed_steps=1, parallel=2) as server:
        stream = Stream(server, LONG | {"max_tokens": 200})
        assert stream.began.wait(DEADLINE)
        engine = server.service.engine
        failed = fail(engine, monkeypatch, lambda job: job.request.limit == MOST)
        answers = asked(server, *[about("Calder")] * 3)
        assert list(map(text_of, answers)) == ["The river of Calder is Vennet."] * 3 and len(failed) == 1
        assert [event["choices"][0]["finish_reason"] for event in stream.finals] == ["length"]
        assert server.metric("slotcache_restarted_requests_total") >= 1


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1.5, "seed": 42},
        {"temperature": 1.0, "seed": 3, "repeat_penalty": 1.4, "dry_multiplier": 0.8},
        {"regex": "(yes|no|perhaps){8,}", "temperature": 0.9, "seed": 7},
        {"regex": "The answer is surely (yes|no), and that (is|was) all", "temperature": 0.9, "seed": 7},
        {"logprobs": True, "top_logprobs": 2, "temperature": 0},
        {"cache_prompt": False, "temperature": 1.5, "seed": 42},
    ],
)
@pytest.mark.parametrize("generate", [None, hybrid])
def test_an_answer_is_the_same_with_a_step_that_failed_in_it(tiny, tmp_path, monkeypatch, generate, fields):
    """To the bit: what its sampler has drawn, and what its grammar has read, stays as it is."""
    with running(generate(tmp_path / "model.gguf") if generate else tiny, failed_steps=2) as server:
        body = {"max_tokens": 24, **fields}
        usual = server.chat("Say something", **body)["choices"]
        for at in (2, 13):
            server.http.delete("/v1/cache")
            undo = monkeypatch.context()
            with undo as patch:
                failed = fail(server.service.engine, patch, lambda job, at=at: job.num_generated >= at)
                assert server.chat("Say something", **body)["choices"] == usual and failed


def test_an_answer_ends_where_what_its_sampler_has_chosen_is_lost(tiny, monkeypatch):
    """Another choice in its place would not be the one that a seed promises."""
    with running(tiny, failed_steps=1) as server:
        engine = server.service.engine
        lose_choices(engine, monkeypatch, lambda spans: any(job.num_generated > 2 for job in engine.scheduler.running))
        stream = Stream(server, LONG | {"max_tokens": 20})
        assert [event["error"]["type"] for event in stream.finals] == ["server_error"]
        assert server.chat()["usage"]["completion_tokens"] == 4


def test_a_stream_with_which_each_step_fails_ends_alone(monkeypatch):
    with running(FILE, failed_steps=3, parallel=3) as server:
        engine = server.service.engine
        failed = fail(engine, monkeypatch, lambda job: is_poison(job) and job.num_generated > 2, times=1000)
        with blocked(server):
            streams = [Stream(server, {"stream": True, "temperature": 0, **about(town)}) for town in ("Calder", "Dunmere")]
            until(lambda: len(server.service.open) == 2)
            poisoned = Stream(server, {"stream": True, "temperature": 0, **about("Farwell"), "max_tokens": POISON})
            until(lambda: len(server.service.open) == 3)
        assert [event["error"]["type"] for event in poisoned.finals] == ["server_error"]
        assert [one.text for one in streams] == ["The river of Calder is Vennet.", "The river of Dunmere is Larrow."]
        assert len(failed[0]) > 1 and [len(one) for one in failed[1:]] == [1, 1]


def asked(server, *bodies):
    """Ask at the same time; the answers."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: server.chat(**body), bodies))


def test_a_request_that_fails_each_step_takes_no_other_one_with_it(monkeypatch):
    with running(FILE, failed_steps=3, parallel=4) as server:
        engine = server.service.engine
        failed = fail(engine, monkeypatch, is_poison, times=1000)
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": POISON}  # the shortest is the first
        with ThreadPoolExecutor(2) as pool:
            # All come at once, so that the first step that fails has requests without a token beside the poisonous one.
            with blocked(server):
                refused = pool.submit(server.http.post, CHAT, json=body)
                until(lambda: len(server.service.open) == 1)
                answers = pool.submit(asked, server, *map(about, RIVERS))
                until(lambda: len(server.service.open) == 9)
            assert refused.result().status_code == 500 and refused.result().json()["error"]["type"] == "server_error"
        texts = [f"The river of {town} is {river}." for town, river in RIVERS.items()]
        assert list(map(text_of, answers.result())) == texts
        assert len(failed[0]) > 1 and [len(one) for one in failed[1:]] == [1, 1]
        assert server.chat()["usage"]["completion_tokens"] == 4


def test_an_error_goes_with_its_requests(tiny, monkeypatch):
    """Raised again and again, one error would keep the frames of all requests that it has ended."""
    with running(tiny, failed_steps=6) as server:
        fail(server.service.engine, monkeypatch, is_poison, times=1000)
        for _ in range(2):
            assert server.http.post(CHAT, json=about("Calder") | {"max_tokens": POISON}).status_code == 500
        server.chat()
        gc.collect()
        kept = [one for one in gc.get_objects() if isinstance(one, RequestError) and "the engine failed" in str(one)]
        assert not kept


def test_streams_pause_while_one_that_may_be_the_cause_runs_alone(monkeypatch):
    with running(FILE, failed_steps=3, parallel=3) as server:
        engine = server.service.engine
        streams = []

        def one_that_waits_for_a_stream(job):
            return is_poison(job) and (not failed or bool(streams))

        failed = fail(engine, monkeypatch, one_that_waits_for_a_stream, times=3)
        # The first failure takes both back to the queue; the stream, at its head, has its tokens when the other one comes.
        body = {"messages": [{"role": "user", "content": question(9, 0)}], "max_tokens": POISON, "temperature": 0}
        with ThreadPoolExecutor(1) as pool, blocked(server):
            streams.append(Stream(server, LONG | about("Calder")))
            until(lambda: len(server.service.open) == 1)
            refused = pool.submit(server.http.post, CHAT, json=body)
            until(lambda: len(server.service.open) == 2)
        assert refused.result().status_code == 500 and [len(one) for one in failed] == [2, 1, 1]
        assert streams[0].text == "The river of Calder is Vennet." and "error" not in streams[0].finals[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.5, "seed": 42},
        {"temperature": 1.0, "seed": 3, "repeat_penalty": 1.4, "dry_multiplier": 0.8},
        {"regex": "(yes|no|perhaps){8,}", "temperature": 0.9, "seed": 7},
        {"logprobs": True, "top_logprobs": 2},
    ],
)
def test_a_sampler_that_has_chosen_begins_again(tiny, monkeypatch, fields):
    """The step fails behind the choice of its token, which nobody saw."""
    body = {"max_tokens": 24, **fields}
    with running(tiny, failed_steps=1) as server:
        usual = server.chat("Say something", **body)["choices"]
        lose_choices(server.service.engine, monkeypatch)
        assert server.chat("Say something", **body)["choices"] == usual


def test_logprobs_of_a_prompt_are_reported_once_where_the_step_after_them_fails(tiny, monkeypatch):
    """An answer that goes on computes its prompt again."""
    with running(tiny, failed_steps=2) as server:
        prompt = list(range(300, 300 + server.service.engine.scheduler._most_scored * 3 // 2))  # two steps tell it
        body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 8, "temperature": 0}
        usual = server.http.post("/v1/completions", json=body).json()["choices"]
        engine = server.service.engine
        failed = fail(engine, monkeypatch, lambda job: job.num_generated >= 3)

        def scores_a_part(spans):
            return failed and any(span.num_scored and not span.logits for span in spans)

        sample = lose_choices(engine, monkeypatch, scores_a_part)
        assert server.http.post("/v1/completions", json=body).json()["choices"] == usual
        assert engine.runner._sample == sample


def test_a_client_is_answered_where_the_end_of_its_request_fails(tiny, monkeypatch):
    with running(tiny, failed_steps=1) as server:
        scheduler, push = server.service.engine.scheduler, Generation.push

        def fails(generation, *given):
            if generation.limit == POISON:
                monkeypatch.setattr(scheduler, "finish", lambda job: monkeypatch.undo() or {}["nothing"])
                raise MemoryError
            return push(generation, *given)

        monkeypatch.setattr(Generation, "push", fails)
        refused = server.http.post(CHAT, json={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": POISON})
        assert refused.status_code == 500 and refused.json()["error"]["type"] == "server_error"
        assert server.chat()["usage"]["completion_tokens"] == 4


def test_a_copy_that_does_not_come_back_is_not_used_again(tiny, monkeypatch):
    with running(tiny, failed_steps=1) as server:
        engine = server.service.engine
        messages, _ = turn(server, 0, [])
        until(lambda: are_copied(engine))
        engine.inbox.ask(lambda: engine.scheduler.tree.evict(10_000)).result(DEADLINE)
        put = States._set

        def broken(states, data, sequence, flags):
            if any(data is node.copy.data for node in engine.scheduler.tree.host.nodes):
                raise RunnerError("it read 0 bytes")
            put(states, data, sequence, flags)

        monkeypatch.setattr(States, "_set", broken)
        _, again = turn(server, 0, messages)
        assert again["usage"]["completion_tokens"] == 4


def test_private_requests_run_again(tiny, monkeypatch):
    with running(tiny, failed_steps=2) as server:
        usual = server.chat("Hello there", cache_prompt=False)["choices"]
        fail(server.service.engine, monkeypatch, lambda job: not job.request.cache, times=2)
        again = server.chat("Hello there", cache_prompt=False)
        assert again["choices"] == usual and again["timings"]["cache_n"] == 0
        check_empty(server.service.engine)


def check_empty(engine):
    """Nothing of a private request is left."""
    assert all(scope.is_shared for scope in engine.inbox.ask(lambda: list(engine.scheduler.tree.roots)).result(DEADLINE))


def test_a_request_whose_client_disconnects_does_not_run_again(tiny, monkeypatch):
    with running(tiny, failed_steps=1) as server:
        engine = server.service.engine
        gate, closed = threading.Event(), threading.Event()

        def hangs(job):
            closed.set()
            return gate.wait(DEADLINE) and is_poison(job)

        fail(engine, monkeypatch, hangs)
        with httpx.stream("POST", server.url + CHAT, json=LONG | {"max_tokens": POISON}, timeout=DEADLINE):
            assert closed.wait(DEADLINE)
        gate.set()
        until(lambda: not server.service.open)
        assert server.chat()["usage"]["completion_tokens"] == 4


def test_a_step_that_hangs_is_reported_and_its_end_as_well(tiny, monkeypatch, caplog):
    monkeypatch.setattr(engines, "TOKEN_SECONDS", 0)
    with running(tiny) as server:
        engine, gate = server.service.engine, threading.Event()
        decode = engine.runner._decode
        monkeypatch.setattr(engine.watchdog, "_seconds", 0.05)
        monkeypatch.setattr(engine.runner, "_decode", lambda **given: gate.wait(DEADLINE) and decode(**given))
        with caplog.at_level(logging.WARNING, "slotcache.engine"), ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.chat)
            until(lambda: server.http.get("/health").status_code == 503)
            error = server.http.get("/health").json()["error"]
            assert error["code"] == "step_hangs" and "a step hangs" in error["message"]
            assert server.http.get("/v1/models").status_code == 200
            gate.set()
        assert answer.result()["usage"]["completion_tokens"] == 4
        until(lambda: server.http.get("/health").status_code == 200)
        assert "the step that hung has ended" in caplog.text
        monkeypatch.setattr(engine.watchdog, "_seconds", 60)
        assert server.metric("slotcache_hung_steps_total") >= 1


def test_the_log_says_where_a_step_hangs(caplog):
    dog = engines.Watchdog(0.01)
    with caplog.at_level(logging.WARNING, "slotcache.engine"):
        dog.watch(threading.get_ident())
        with dog.step(0):
            until(lambda: "a step hangs" in caplog.text)
            assert dog.hanging > 0
        assert dog.hanging == 0 and dog.num_hangs == 1 and "until(lambda" in caplog.text
    dog.close()


@pytest.mark.parametrize("seconds", [0, 300])
def test_a_long_prompt_is_no_hang(seconds, monkeypatch):
    """A step of many tokens may take a second for each, as on a machine that is slow."""
    dog, now = engines.Watchdog(seconds), [1000.0]
    monkeypatch.setattr(engines, "perf_counter", lambda: now[0])
    with dog.step(512):
        now[0] += 300 + 511
        assert not dog.hanging
        now[0] += 2
        assert bool(dog.hanging) == bool(seconds)


def test_a_model_whose_states_do_not_come_back_keeps_no_snapshots(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Runner, "_states_come_back", lambda runner: False)
    with caplog.at_level(logging.WARNING, "slotcache.engine"), running(hybrid(tmp_path / "hybrid.gguf")) as server:
        messages, _ = turn(server, 0, [])
        assert turn(server, 0, messages)[1]["timings"]["cache_n"] == 0
        assert "it keeps no snapshots" in caplog.text


def test_neither_a_load_nor_a_sleep_hangs(tiny, monkeypatch):
    watched = []
    with running(tiny, sleep_idle_seconds=3600) as server:
        engine = server.service.engine
        load = engine.runner.context.open
        monkeypatch.setattr(engine.runner.context, "open", lambda: (watched.append(engine.watchdog._step), load())[1])
        server.chat()

        def sleeps():
            engine.inbox.put(lambda: setattr(engine.sleep, "last_use", -3600))
            return engine.sleep.is_asleep

        until(sleeps)
        watched.append(engine.watchdog._step)
        assert server.chat()["usage"]["completion_tokens"] == 4 and watched == [None] * 2
