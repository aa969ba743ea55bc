"""Ending a batch early leaves everything as it was before."""

import itertools
import math
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from slotcache.models import llama
from slotcache.models.errors import Interrupted
from slotcache.models.model import Model
from support.lab import Lab
from support.on_device import needs_abort, same_answers


@pytest.fixture(scope="module")
def model(tiny):
    model = Model(tiny)
    yield model
    model.close()


def test_what_is_ended_early_is_computed_again_and_nothing_differs(model):
    prompt = np.random.default_rng(3).integers(300, 900, 1500).astype(np.int32)
    lab = Lab(model, batch=2000, budget=2000)
    reference = lab.run(prompt, limit=3, cache=False)
    answer = lab.submit(prompt, limit=3, cache=False, background=True)
    lab.runner.interrupt.set()
    plan = lab.scheduler.plan()
    assert plan.background and plan.spans
    with pytest.raises(Interrupted):
        lab.runner.run(plan)
    lab.runner.interrupt.clear()
    lab.finish()
    assert same_answers(answer, reference)
    lab.close()


@needs_abort
def test_nothing_is_left_of_the_kernels_before_the_one_that_is_ended(model):
    prompt = np.random.default_rng(3).integers(300, 900, 500).astype(np.int32)
    lab = Lab(model, batch=500, budget=500, kernel=20, flash="on")
    asked, last = itertools.count(), [math.inf]
    lab.runner.interrupt._callback = llama.ggml_abort_callback(lambda _: next(asked) > last[0])
    lab.submit(prompt, limit=3, cache=False, background=True)
    lab.step()
    num_asked = next(asked)
    lab.finish()
    asked, last[0] = itertools.count(), 0.7 * num_asked
    answer = lab.submit(prompt, limit=3, cache=False, background=True)
    plan = lab.scheduler.plan()
    with pytest.raises(Interrupted):
        lab.runner.run(plan)
    last[0] = math.inf
    lab.finish()
    plain = Lab(model, batch=500, budget=500, kernel=20, flash="on")
    reference = plain.run(prompt, limit=3, cache=False)
    assert same_answers(answer, reference)
    lab.close()
    plain.close()


@needs_abort
def test_from_another_thread_in_the_middle(model):
    prompt = np.random.default_rng(3).integers(300, 900, 1900).astype(np.int32)
    lab = Lab(model, batch=2000, budget=2000)
    lab.context.model = model

    def run():
        lab.submit(prompt, limit=1, cache=False)
        plan = replace(lab.scheduler.plan(), background=True)
        began = time.perf_counter()
        try:
            lab.runner.run(plan, lab.samplers)
            return time.perf_counter() - began
        finally:
            lab.scheduler.recover()
            lab.runner.clear()

    def run_interrupted(whole):
        timer = threading.Timer(whole / 10, lab.runner.interrupt.set)
        timer.start()
        try:
            return run()
        finally:
            timer.join()
            lab.runner.interrupt.clear()

    whole = run()
    with pytest.raises(Interrupted):
        for _ in range(20):  # where this process has to wait for a core, a batch may end before the timer
            whole = min(whole, run_interrupted(whole))
    lab.close()


def test_what_somebody_waits_for_is_never_ended_early(model):
    lab = Lab(model)
    lab.runner.interrupt.set()
    assert lab.run(np.arange(300, 500, dtype=np.int32), limit=2).tokens
    lab.close()
