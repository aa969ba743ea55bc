"""The bundled corpus: each answer is a sentence of its document, among five that a search found."""

from slotcache.models.demo.corpus import Corpus


def test_every_bundled_answer_is_a_sentence_of_its_document() -> None:
    corpus = Corpus.load()
    assert len(corpus.documents) == 60 and len(corpus.questions) == len({one.question for one in corpus.questions}) == 100
    for one in corpus.questions:
        assert f" {one.answer} " in f" {corpus.documents[one.document].text} "
        assert one.document in one.ranked and len(set(one.ranked)) == 5 and set(one.ranked) <= set(corpus.documents)
    assert sum(corpus.questions[0].ranked != one.ranked for one in corpus.questions) > 80
