"""Train the demo model for a given time: python3 -m models.training.training --out FOLDER --seconds 540

Writes `model-*.bin` (the weights, for the export) and `state-*.bin` (to continue with --resume) to FOLDER.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]

from . import beginning, checkpoint
from .encoder import Encoder
from .loss import BatchLoss, LossWeights
from .muon import Muon
from .network import Network, NetworkShape
from .stream import Batch, Stream
from .watch import exact_match, samples_of
from .world.curriculum import CURRICULA, FREER_HELD_OUT, held_out

SHAPES = {
    "large": NetworkShape(),
    # A large base frees half of each head from position: names are matched over thousands of tokens.
    "small": NetworkShape(layers=6, width=128, heads=4, kv_heads=4, head_size=32, feed_forward=352, rope_base=1e8),
}
WARM_UP = 150  # steps
LOG_EVERY = 10.0  # seconds
LEVEL_EVERY = 45.0  # s between checks for the next level
SAVE_EVERY = 45.0
RESERVE = 12.0  # seconds at the end for the last exact match and the last checkpoint
LONGEST_STEP = 20.0  # seconds; a longer step was a pause of the whole process (SIGSTOP), which does not count


@dataclass(slots=True)
class Progress:
    """The progress of a training; part of its checkpoints."""

    step: int = 0
    level: int = 0
    tokens: int = 0
    trained_seconds: float = 0.0


class Trainer:
    """The training of one call: warm-up, a constant rate, and a decline to zero over the last share of the time."""

    def __init__(self, args: argparse.Namespace, started: float) -> None:
        self.args, self.started = args, started
        self.progress = Progress()
        self.first_step = 0
        torch.manual_seed(args.seed)
        saved = checkpoint.load(args.resume, "state") if args.resume else None
        if args.start and not saved:
            saved = beginning.read(args.start, SHAPES[args.size])
            saved["progress"] = asdict(Progress(level=len(CURRICULA[args.size].levels) - 1))
        if saved:
            self.progress = Progress(**saved["progress"])
            self.first_step = self.progress.step - (WARM_UP if "optimizers" in saved else 0)  # they are warm
        # The workers start first: a process that has initialised CUDA must not be forked.
        seed = args.seed + self.progress.step  # a different seed for each call
        self.stream = Stream(args.workers, args.tokens, seed, size=args.size, level=self.progress.level)
        self.encoder = Encoder.load()
        self.device = args.device
        torch.backends.cuda.enable_cudnn_sdp(False)  # it compiles anew for every width
        self.dtype = torch.bfloat16 if args.bfloat16 or self.device == "cuda" else torch.float32
        shape = NetworkShape(**saved["shape"]) if saved else SHAPES[args.size]
        self.network = Network(shape).to(self.device)
        self.optimizers = self._optimizers()
        if saved:
            self._restore(saved)
        weights = LossWeights(text=args.text_weight, finders=args.finder_weight, scored=args.scored)
        self.loss = BatchLoss(self.network, self.dtype, weights)
        self.curriculum = CURRICULA[args.size]
        self.sets = samples_of(held_out(args.size) | FREER_HELD_OUT, args.watch_count, self.encoder)
        levels = {str(number): level for number, level in enumerate(self.curriculum.levels)}
        self.level_sets = samples_of(levels, args.watch_count, self.encoder)
        self.good: dict[str, torch.Tensor] = {}

    def run(self) -> None:
        """Train until the time is over."""
        num = sum(parameter.numel() for parameter in self.network.parameters())
        print(f"{num:,} parameters on {self.device}, {self.stream.num_workers} workers", flush=True)
        if self.args.compile and not self._compiles():
            self.network.plain_parts()
        logged = watched = looked = saved = last = time.monotonic()
        logged_tokens, decaying = self.progress.tokens, False
        given, spent = self.args.seconds - RESERVE - (last - self.started), 0.0
        while (share := spent / max(given, 1)) < 1:
            batch = self.stream.next()
            rate = self._rate(share)
            if not decaying and share > 1 - self.args.decay:
                decaying = True
                self.save_state()
            self._step(batch, rate)
            now = time.monotonic()
            spent, last = spent + min(now - last, LONGEST_STEP), now
            if now - logged >= LOG_EVERY:
                self._log(share, rate, (self.progress.tokens - logged_tokens) / (now - logged))
                logged, logged_tokens = now, self.progress.tokens
            if now - watched >= self.args.watch_every:
                self.watch()
                watched = time.monotonic()
            if now - looked >= LEVEL_EVERY and self.progress.level < self._last_level:
                self._rise(share)
                looked = time.monotonic()
            if now - saved >= SAVE_EVERY:
                self.save_model()
                if not decaying or self.args.decay >= 1:  # else --resume continues from before the decline
                    self.save_state()
                saved = time.monotonic()
        self.watch()
        self.save_model()

    def _rate(self, share: float) -> float:
        warm = min(1.0, (self.progress.step - self.first_step + 1) / WARM_UP)
        decline = min(1.0, (1 - share) / self.args.decay)
        return self.args.rate * warm * (0.01 + 0.99 * decline)

    def _step(self, batch: Batch, rate: float) -> None:
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = rate
        loss = self.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.network.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.tokens += int((batch.marks > 0).sum())

    def _compiles(self) -> bool:
        """Whether torch.compile works here. Tries one whole step and drops its gradients."""
        begun = time.monotonic()
        try:
            self.network.compile_parts(score=self.args.scored >= 1)
            self.loss(self.stream.next()).backward()
            self._wait()
        except Exception as error:  # a missing compiler, for example
            print(f"not compiled: {type(error).__name__}: {str(error)[:300]}", flush=True)
            return False
        finally:
            self.network.zero_grad(set_to_none=True)
        print(f"compiled in {time.monotonic() - begun:.0f} s", flush=True)
        return True

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _log(self, share: float, rate: float, speed: float) -> None:
        sums = self.loss.take_sums()
        loss = sums.loss
        pool = self.stream.pool
        print(
            f"{time.monotonic() - self.started:5.0f} s {100 * share:3.0f} %  step {self.progress.step:6}  "
            f"level {self.progress.level}  answers: loss {loss:.4f} tokens right {sums.right:.4f}  "
            f"finders: loss {sums.finders:.3f}  rate {rate:.1e}  {speed / 1e3:.0f}k tokens/s  "
            f"{self.progress.tokens / 1e6:.0f}M tokens  "
            f"reused {100 * pool.reused / max(pool.drawn, 1):.0f} %  waiting {pool.waiting / 1e6:.1f}M  "
            f"workers {self.stream.num_workers}",
            flush=True,
        )
        if not math.isfinite(loss):
            self._go_back()
        elif loss < 20:
            self.good = {name: tensor.clone() for name, tensor in self.network.state_dict().items()}

    def _go_back(self) -> None:
        """Return to the last finite weights, with half the learning rate and fresh optimizers."""
        print("the loss is not finite: back to the weights of the last line, half the rate", flush=True)
        if self.good:
            self.network.load_state_dict(self.good)
        self.args.rate /= 2
        self.first_step = self.progress.step
        self.optimizers = self._optimizers()

    def watch(self) -> None:
        """Print exact match on the held-out sets."""
        begun = time.monotonic()
        scores = {name: exact_match(self.network, one, self.device, self.dtype) for name, one in self.sets.items()}
        text = "  ".join(f"{name} {score:.2f}" for name, score in scores.items())
        print(f"exact match: {text}  ({time.monotonic() - begun:.1f} s)", flush=True)

    def _rise(self, share: float) -> None:
        """Go to the next level if it is time."""
        level = self.progress.level
        at_level = exact_match(self.network, self.level_sets[str(level)], self.device, self.dtype)
        print(f"exact match at level {level}: {at_level:.2f}", flush=True)
        due = sum(share >= start for start in self.curriculum.due) - 1
        if level < self._last_level and (at_level >= self.curriculum.goal or due > level):
            self.progress.level = level + 1
            self.stream.set_level(level + 1)

    def save_model(self) -> None:
        """Save the weights alone, with 16 bits a number."""
        self._save("model", self._checkpoint())

    def save_state(self) -> None:
        """Save the weights and the optimizers' state."""
        states = [checkpoint.halved_state(optimizer.state_dict()) for optimizer in self.optimizers]
        self._save("state", {**self._checkpoint(), "optimizers": states})

    def _checkpoint(self) -> checkpoint.Checkpoint:
        weights = checkpoint.halved(self.network.state_dict(), torch.float16)
        return {"weights": weights, "shape": asdict(self.network.shape), "progress": asdict(self.progress)}

    def _save(self, name: str, content: checkpoint.Checkpoint) -> None:
        try:
            checkpoint.save(self.args.out, name, content)
        except OSError as error:  # a full disk must not end the training
            print(f"{name} not saved: {error}", flush=True)

    def _groups(self) -> list[list[tuple[str, torch.nn.Parameter]]]:
        """Return the matrices, which have weight decay, and the norms, which have none."""
        named = list(self.network.named_parameters())
        matrices = [(name, p) for name, p in named if p.ndim > 1 and name != "token_embd"]
        return [matrices, [(name, p) for name, p in named if p.ndim == 1 or name == "token_embd"]]

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        matrices, rest = ([parameter for _, parameter in group] for group in self._groups())
        rate = self.args.rate
        if self.args.muon:
            muon = Muon(matrices, lr=rate, weight_decay=0.05)
            return [muon, torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)]
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
        return [torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=self.device == "cuda")]

    def _restore(self, saved: checkpoint.Checkpoint) -> None:
        self.network.load_state_dict({name: tensor.float() for name, tensor in saved["weights"].items()})
        for optimizer, state in zip(self.optimizers, saved.get("optimizers", []), strict="optimizers" in saved):
            optimizer.load_state_dict(state)
        print(f"goes on from step {self.progress.step}, level {self.progress.level}", flush=True)

    @property
    def _last_level(self) -> int:
        return len(self.curriculum.levels) - 1


def main() -> None:
    """Run the command line."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(prog="python3 -m models.training.training", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for checkpoints")
    add("--resume", type=Path, help="folder with a state-*.bin to go on from")
    add("--start", type=Path, help="GGUF of `export` to begin with instead of random weights")
    add("--seconds", type=float, default=540, help="of this call, start and end included, pauses not (default: %(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    add("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="processes that write samples")
    add("--tokens", type=int, default=98_304, help="a step (default: %(default)s)")
    add("--rate", type=float, default=2e-3, help="learning rate (default: %(default)s)")
    add("--decay", type=float, default=0.35, help="share of the time in which the rate declines (default: %(default)s)")
    add("--watch-count", type=int, default=200, help="conversations of each held-out set (default: %(default)s)")
    add("--watch-every", type=float, default=30.0, help="seconds between looks at them (default: %(default)s)")
    add("--seed", type=int, default=1)
    add("--size", choices=SHAPES, default="large", help="of the network and of what it is to learn")
    add("--muon", action="store_true", help="Muon for the matrices: fewer steps")
    add("--text-weight", type=float, default=0.1, help="of tokens besides answers: many are noise (default: %(default)s)")
    add("--finder-weight", type=float, default=0.3, help="of the loss of the heads in FINDERS (default: %(default)s)")
    add("--scored", type=float, default=1.0, help="share of the tokens besides answers that are scored")
    add("--bfloat16", action="store_true", help="on a CPU too: with AMX a step takes a quarter less time")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile, where it works")
    trainer = Trainer(parser.parse_args(), started)
    try:
        trainer.run()
    finally:
        trainer.stream.close()


if __name__ == "__main__":
    main()
