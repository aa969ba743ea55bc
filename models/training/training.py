"""Trains the demo model for a given time: python3 -m models.training.training --out FOLDER --seconds 540

Leaves `model-*.bin` (the weights, for the export) and `state-*.bin` (to go on from with --resume) in FOLDER.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]

from . import checkpoint
from .encoder import Encoder
from .finders import FINDERS, finding_loss
from .muon import Muon
from .network import Network, NetworkShape
from .sample import HEAD
from .stream import Batch, Stream
from .watch import exact_match, samples_of
from .world.curriculum import CURRICULA, held_out

SHAPES = {
    "large": NetworkShape(),
    # A large base leaves half of each head free of position: names are matched over thousands of tokens.
    "small": NetworkShape(layers=4, width=128, heads=4, kv_heads=4, head_size=32, feed_forward=352, rope_base=1e8),
}
WARM_UP = 150  # steps
LOG_EVERY = 10.0  # seconds
LEVEL_EVERY = 45.0  # a look whether it is time for the next level
SAVE_EVERY = 45.0
RESERVE = 12.0  # seconds at the end for the last look and the last checkpoint
HEAD_WEIGHT = 3.0
LONGEST_STEP = 20.0  # seconds; what takes longer was a pause of the whole process (SIGSTOP), which is not counted


@dataclass(slots=True)
class Progress:
    """Where the training stands; goes into checkpoints."""

    step: int = 0
    level: int = 0
    tokens: int = 0
    trained_seconds: float = 0.0


class Trainer:
    """One call's training: warm-up, a constant rate, and a decline to nothing over the last share of the time."""

    def __init__(self, args: argparse.Namespace, started: float) -> None:
        self.args, self.started = args, started
        self.progress = Progress()
        self.first_step = 0
        torch.manual_seed(args.seed)
        saved = checkpoint.load(args.resume, "state") if args.resume else None
        if saved:
            self.progress = Progress(**saved["progress"])
            self.first_step = self.progress.step
        # The workers are started first: a process with CUDA in it must not be forked.
        seed = args.seed + self.progress.step  # another one for each call
        self.stream = Stream(args.workers, args.tokens, seed, args.size, self.progress.level)
        self.encoder = Encoder.load()
        self.device = args.device
        torch.backends.cuda.enable_cudnn_sdp(False)  # it prepares itself anew for every width
        self.dtype = torch.bfloat16 if args.bfloat16 or self.device == "cuda" else torch.float32
        shape = NetworkShape(**saved["shape"]) if saved else SHAPES[args.size]
        self.network = Network(shape).to(self.device)
        self.optimizers = self._optimizers()
        if saved:
            self._restore(saved)
        self.curriculum = CURRICULA[args.size]
        self.sets = samples_of(held_out(args.size), args.watch_count, self.encoder)
        levels = {str(number): level for number, level in enumerate(self.curriculum.levels)}
        self.level_sets = samples_of(levels, args.watch_count, self.encoder)
        self.seen = torch.zeros(5, device=self.device)  # since the last line: loss, hits and number of answer tokens;
        # loss and number of the finder's looks
        self.good: dict[str, torch.Tensor] = {}

    def run(self) -> None:
        """Until the time is over."""
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
                if not decaying or self.args.decay >= 1:  # else what was saved before the decline is to go on from
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
        loss = self._loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.network.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.tokens += int((batch.marks > 0).sum())

    def _loss(self, batch: Batch) -> torch.Tensor:
        tokens, marks, sentences, sought = self._to_device(batch)
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        x = self.network.hidden(tokens[:, :-1], self.dtype, seen=seen)
        lost = torch.cat([finding_loss(*seen[layer], head, sentences[:, :-1], sought[:, :-1]) for layer, head in FINDERS])
        target, mark = tokens[:, 1:].reshape(-1), _with_heads(marks)[:, 1:].reshape(-1)
        if self.args.scored < 1:
            kept = ((mark >= 2) | ((mark == 1) & (torch.rand(len(mark)) < self.args.scored))).nonzero()[:, 0]
            x, target, mark = x[kept], target[kept], mark[kept]
        losses, right = self.network.score(x, target)
        answer = mark >= 2
        weight = answer + (HEAD_WEIGHT - 1) * (mark == 3) + self.args.text_weight / self.args.scored * (mark == 1)
        with torch.no_grad():
            found = torch.stack([lost.detach().sum(), torch.tensor(float(len(lost)), device=self.device)])
            self.seen += torch.cat([torch.stack([(losses * answer).sum(), (right & answer).sum(), answer.sum()]), found])
        loss = (losses * weight).sum() / weight.sum()
        return loss + self.args.finder_weight * lost.mean() if len(lost) else loss

    def _to_device(self, batch: Batch) -> list[torch.Tensor]:
        fields = [torch.from_numpy(field) for field in (batch.tokens, batch.marks, batch.sentences, batch.sought)]
        if self.device == "cuda":
            fields = [field.pin_memory() for field in fields]
        tokens, *rest = (field.to(self.device, non_blocking=True) for field in fields)
        return [tokens.long(), *rest]

    def _compiles(self) -> bool:
        """Whether torch.compile works here; tried on a whole step, whose gradients are thrown away."""
        begun = time.monotonic()
        try:
            self.network.compile_parts(score=self.args.scored >= 1)
            self._loss(self.stream.next()).backward()
            self._wait()
        except Exception as error:  # whatever is missing for it
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
        total, hits, count, lost, looks = self.seen.tolist()
        self.seen.zero_()
        loss, right = total / max(count, 1), hits / max(count, 1)
        pool = self.stream.pool
        print(
            f"{time.monotonic() - self.started:5.0f} s {100 * share:3.0f} %  step {self.progress.step:6}  "
            f"level {self.progress.level}  answers: loss {loss:.4f} tokens right {right:.4f}  "
            f"finders: loss {lost / max(looks, 1):.3f}  rate {rate:.1e}  {speed / 1e3:.0f}k tokens/s  "
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
        """To the last weights that were sound, with half the rate and nothing remembered of the gradients."""
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
        """Go to the next level where it is time to."""
        level = self.progress.level
        at_level = exact_match(self.network, self.level_sets[str(level)], self.device, self.dtype)
        print(f"exact match at level {level}: {at_level:.2f}", flush=True)
        due = sum(share >= start for start in self.curriculum.due) - 1
        if level < self._last_level and (at_level >= self.curriculum.goal or due > level):
            self.progress.level = level + 1
            self.stream.set_level(level + 1)

    def save_model(self) -> None:
        """The weights alone, with 16 bits a number."""
        weights = checkpoint.halved(self.network.state_dict(), torch.float16)
        self._save("model", {"weights": weights})

    def save_state(self) -> None:
        """The weights and what the optimizer remembers."""
        content = {
            "weights": checkpoint.halved(self.network.state_dict(), torch.float16),
            "optimizers": [checkpoint.halved_state(optimizer.state_dict()) for optimizer in self.optimizers],
        }
        self._save("state", content)

    def _save(self, name: str, content: dict) -> None:
        try:
            facts = {"shape": asdict(self.network.shape), "progress": asdict(self.progress)}
            checkpoint.save(self.args.out, name, content | facts)
        except OSError as error:  # a full disk is no reason to stop learning
            print(f"{name} not saved: {error}", flush=True)

    def _groups(self) -> list[list[tuple[str, torch.nn.Parameter]]]:
        """Matrices, whose weights decay, and norms, whose weights do not."""
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

    def _restore(self, saved: dict) -> None:
        self.network.load_state_dict({name: tensor.float() for name, tensor in saved["weights"].items()})
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        print(f"goes on from step {self.progress.step}, level {self.progress.level}", flush=True)

    @property
    def _last_level(self) -> int:
        return len(self.curriculum.levels) - 1


def _with_heads(marks: torch.Tensor) -> torch.Tensor:
    """Marks (rows, tokens) with 3 in place of 2 where an answer begins."""
    before = torch.nn.functional.pad(marks, (HEAD, 0))[:, :-HEAD]
    return torch.where((marks == 2) & (before != 2), 3, marks)


def main() -> None:
    """The command line."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(prog="python3 -m models.training.training", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for checkpoints")
    add("--resume", type=Path, help="folder with a state-*.bin to go on from")
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
