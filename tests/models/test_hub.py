"""Choosing a file of a repository; the download itself is the library's."""

import pytest
from slotcache.models.errors import ModelError
from slotcache.models.model_files import choose, named, with_all_parts

FILES = ["README.md", "m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "mmproj-m-F16.gguf"]
SPLIT = ["m-q4_k_m-00001-of-00002.gguf", "m-q4_k_m-00002-of-00002.gguf", "m-q8_0-00001-of-00003.gguf"]


def test_the_quantisation_asked_for_is_taken():
    assert choose(FILES, "q8_0", "x") == "m-Q8_0.gguf"
    assert choose(FILES, "Q4_K_S", "x") == "m-Q4_K_S.gguf"


def test_the_preferred_one_is_taken_otherwise():
    assert choose(FILES, "", "x") == "m-Q4_K_M.gguf"
    assert choose(["m-IQ2_XS.gguf"], "", "x") == "m-IQ2_XS.gguf"


def test_what_there_is_is_named_when_nothing_fits():
    with pytest.raises(ModelError, match="there are m-Q4_K_M"):
        choose(FILES, "Q6_K", "user/repo:Q6_K")
    with pytest.raises(ModelError, match="there are none"):
        choose(["README.md"], "", "user/repo")


def test_a_named_file_is_taken_if_the_repository_has_it():
    assert named(FILES, "m-Q8_0.gguf", "x") == "m-Q8_0.gguf"
    with pytest.raises(ModelError, match=r"no file q8\.gguf; there are README\.md"):
        named(FILES, "q8.gguf", "x")


def test_all_parts_of_a_split_model_are_fetched():
    assert with_all_parts(SPLIT, SPLIT[0]) == SPLIT[:2]
    assert with_all_parts(FILES, "m-Q8_0.gguf") == ["m-Q8_0.gguf"]
