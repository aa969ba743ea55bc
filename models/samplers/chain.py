"""llama.cpp's samplers in llama-server's order, each with the parameters that it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import llama_cpp

from ..model import Model
from .parameters import Sampling

Link: TypeAlias = "llama_cpp.llama_sampler_p"
MIROSTAT_TOKENS = 100  # the most probable ones, from which Mirostat 1 estimates
MAX_INFILL = 128  # tokens that infill compares with each other, pair by pair


def _infill(model: Model, sampling: Sampling) -> list[Link]:
    limit = llama_cpp.llama_sampler_init_top_k(MAX_INFILL)
    return [limit, llama_cpp.llama_sampler_init_infill(model.vocab)]


LINKS: dict[str, Callable[[Model, Sampling], list[Link]]] = {
    "top_n_sigma": lambda model, sampling: [llama_cpp.llama_sampler_init_top_n_sigma(sampling.top_n_sigma)],
    "top_k": lambda model, sampling: [llama_cpp.llama_sampler_init_top_k(sampling.top_k)],
    "typ_p": lambda model, sampling: [llama_cpp.llama_sampler_init_typical(sampling.typical_p, sampling.min_keep)],
    "top_p": lambda model, sampling: [llama_cpp.llama_sampler_init_top_p(sampling.top_p, sampling.min_keep)],
    "min_p": lambda model, sampling: [llama_cpp.llama_sampler_init_min_p(sampling.min_p, sampling.min_keep)],
    "xtc": lambda model, sampling: [
        llama_cpp.llama_sampler_init_xtc(
            sampling.xtc_probability, sampling.xtc_threshold, sampling.min_keep, bits(sampling.seed)
        )
    ],
    "temperature": lambda model, sampling: [
        llama_cpp.llama_sampler_init_temp_ext(sampling.temperature, sampling.dynatemp_range, sampling.dynatemp_exponent)
    ],
    "infill": _infill,
}
"""The links that a name in `samplers` adds."""


def chain_of(links: Iterable[Link]) -> Link:
    """Return a chain, which owns its links."""
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    for link in links:
        llama_cpp.llama_sampler_chain_add(chain, link)
    return chain


def links_of(model: Model, sampling: Sampling, names: Sequence[str]) -> list[Link]:
    """Return the links of these samplers, in order."""
    return [link for name in names if name in LINKS for link in LINKS[name](model, sampling)]


def mirostat(model: Model, sampling: Sampling) -> list[Link]:
    """Return Mirostat, which takes the place of the other samplers."""
    seed, tau, eta = bits(sampling.seed), sampling.mirostat_tau, sampling.mirostat_eta
    temperature = llama_cpp.llama_sampler_init_temp(sampling.temperature)
    if sampling.mirostat == 1:
        return [temperature, llama_cpp.llama_sampler_init_mirostat(model.num_vocab, seed, tau, eta, MIROSTAT_TOKENS)]
    return [temperature, llama_cpp.llama_sampler_init_mirostat_v2(seed, tau, eta)]


def choice(sampling: Sampling) -> Link:
    """Return the link that chooses among the tokens that the others left."""
    seed = bits(sampling.seed)
    if "adaptive_p" in sampling.samplers:
        return llama_cpp.llama_sampler_init_adaptive_p(sampling.adaptive_target, sampling.adaptive_decay, seed)
    return llama_cpp.llama_sampler_init_dist(seed)


def bits(seed: int) -> int:
    """Return a seed as llama.cpp takes it."""
    return seed & 0xFFFFFFFF
