"""The very word of a document finds it: in twenty languages, folded, stemmed, in scripts without spaces, as identifiers."""

import asyncio
import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slotcache.retrieval import Index, Query, languages, terms
from slotcache.retrieval.languages import language_of
from slotcache.retrieval.terms import STEMS, fold, sought, terms_of, words_of
from slotcache.retrieval.words import fts_query, words_sought

SENTENCES = {
    "en": "The keeper of the lighthouse repaired both pumps before the winter storms came from the north.",
    "de": "Der Wärter hat die Straße zum Leuchtturm gesperrt, weil die Häuser am Ufer überschwemmt wurden.",
    "fr": "Le gardien du phare a réparé les pompes avant que les tempêtes de l'hiver ne soient arrivées.",
    "es": "El guardián del faro reparó las bombas antes de que llegaran las tormentas, según las informaciones.",
    "it": "Il guardiano del faro ha riparato le pompe prima che le tempeste dell'inverno arrivassero in città.",
    "pt": "O guardião do farol consertou as bombas antes que as tempestades chegassem, segundo as informações.",
    "nl": "De wachter van de vuurtoren heeft de pompen gerepareerd voordat de winterstormen uit het noorden kwamen.",
    "sv": "Fyrvaktaren hade reparerat pumparna innan höststormarna kom från havet och översvämmade gatorna.",
    "da": "Fyrpasseren havde repareret pumperne, før efterårets storme kom fra havet og oversvømmede gaderne.",
    "fi": "Majakanvartija korjasi pumput ennen kuin syysmyrskyt tulivat mereltä ja tulvat peittivät kadut.",
    "pl": "Latarnik naprawił pompy, zanim zimowe burze przyszły z północy, a ulice w Łodzi były zalane.",
    "cs": "Strážce majáku opravil čerpadla dříve, než přišly zimní bouře ze severu a ulice byly zaplaveny.",
    "hu": "A világítótorony őre megjavította a szivattyúkat, mielőtt a téli viharok északról megérkeztek.",
    "tr": "Fener bekçisi, kış fırtınaları kuzeyden gelmeden önce İstanbul'daki pompaları onardı ve ışığı yaktı.",
    "ru": "Смотритель маяка починил насосы прежде, чем с севера пришли зимние штормы, а ёлки ещё стояли.",
    "el": "Ο φύλακας του φάρου επισκεύασε τις αντλίες πριν έρθουν οι χειμερινές καταιγίδες από τον βορρά.",
    "ar": "أصلح حارس المنارة المضخات قبل أن تصل عواصف الشتاء من الشمال إلى المدينة القديمة.",
    "he": "שומר המגדלור תיקן את המשאבות לפני שהגיעו סערות החורף מהצפון אל העיר העתיקה.",
    "hi": "प्रकाशस्तंभ के रखवाले ने सर्दियों के तूफान आने से पहले पुरानी किताबें और पंप ठीक कर दिए थे।",
    "zh": "灯塔的看守人在冬季风暴从北方到来之前修好了水泵。",
    "ja": "灯台守は冬の嵐が北から来る前にポンプを修理しました。",
    "ko": "등대지기는 겨울 폭풍이 북쪽에서 오기 전에 펌프를 수리했습니다.",
    "th": "คนเฝ้าประภาคารซ่อมปั๊มน้ำก่อนที่พายุฤดูหนาวจะมาจากทางเหนือ",
    "lo": "ຜູ້ເຝົ້າປະພາຄານໄດ້ສ້ອມແປງປ້ຳນ້ຳກ່ອນພາຍຸລະດູໜາວ",
    "km": "អ្នកយាមបង្គោលភ្លើងបានជួសជុលម៉ាស៊ីនបូមទឹកមុនពេលព្យុះរដូវរងា",
    "my": "မီးပြတိုက်စောင့်သည် ဆောင်းရာသီမုန်တိုင်းများမလာမီ ရေစုပ်စက်များကို ပြုပြင်ခဲ့သည်။",
}
"""A sentence of each language."""

PARTS = {  # of languages whose words have no ends: what is looked for
    "zh": ["水泵", "风暴", "看守人"],
    "ja": ["灯台", "ポンプ", "修理"],
    "ko": ["등대", "폭풍", "펌프", "북쪽"],
    "th": ["ประภาคาร", "พายุ", "ปั๊มน้ำ"],
    "lo": ["ປະພາຄານ", "ພາຍຸ"],
    "km": ["បង្គោលភ្លើង", "ព្យុះ"],
    "my": ["မီးပြတိုက်", "မုန်တိုင်း"],
}


@pytest.fixture
def search(tmp_path):
    """Opens an index of texts by the names of their files, and returns what finds the files for a question."""
    opened = []

    def open_index(texts, suffix=".md"):
        folder = tmp_path / "notes"
        folder.mkdir()
        for name, text in texts.items():
            (folder / f"{name}{suffix}").write_text(text)
        opened.append(Index([folder], tmp_path / "index.db"))
        opened[0].refresh()

        def found(question):
            hits = asyncio.run(opened[0].search().hits(Query(text=question, top_k=50)))
            return [hit.chunk.places[0].path.removesuffix(suffix) for hit in hits]

        return found

    yield open_index
    for index in opened:
        index.store.check()
        index.close()


def test_the_examples_of_the_docstrings_are_right():
    assert doctest.testmod(terms).failed == 0 < doctest.testmod(terms).attempted


def test_each_word_of_a_text_finds_it_in_every_language(search):
    found = search(SENTENCES)
    for language, text in SENTENCES.items():
        for word in PARTS.get(language) or text.split():
            assert language in found(word), (language, word)
            assert language in found(word.upper()) and language in found(word.lower()), (language, word)


@pytest.mark.parametrize(
    "written, asked",
    [
        ("Die Straße ist lang", "strasse STRASSE Straße"),
        ("The ﬁrst oﬃce", "first office ﬁrst"),
        ("Ｆｕｌｌ　ｗｉｄｔｈ １２３", "full width 123 Ｆｕｌｌ"),
        ("Η ώρα της Αθήνας είναι", "ωρα ΩΡΑ Αθηνας ώρα"),
        ("Ёлка и ёжик в лесу", "елка Елка ёлка ежик"),
        ("هٰذَا كِتَابٌ جَدِيدٌ", "كتاب جديد كِتَابٌ"),
        ("בְּרֵאשִׁית בָּרָא אֱלֹהִים", "בראשית אלהים בָּרָא"),
        ("Łódź i Gdańsk są w Polsce", "Lodz łódź gdansk"),
        ("İstanbul ve IĞDIR ile ılık", "istanbul İSTANBUL Istanbul iğdir ılık ilik"),
        ("Crème brûlée à la carte", "creme brulee crème"),
        ("La información según él", "informacion información INFORMACIÓN informaciones"),
        ("A informação é boa e não", "informacao informações"),
        ("cafe\u0301 nai\u0308ve", "café cafe naïve"),
        ("Blåbærsyltetøy på brød", "blabaersyltetoy brod BRØD"),
        ("کتاب فارسی می\u200cخواهم", "كتاب میخواهم"),
        ("प्रकाश ज़रूर", "जरूर ज़रूर"),
        ("조선\u1112\u1161\u11ab\u1100\u1173\u11af", "한글"),  # as macOS names files
        ("ｶﾞｲﾄﾞ を読む", "ガイド"),
        ("soft\u00adhyphen", "softhyphen"),
    ],
)
def test_a_word_is_found_however_it_is_typed(search, written, asked):
    found = search({"it": written, "other": "Nothing of the kind."})
    for word in asked.split():
        assert found(word)[:1] == ["it"], word


@pytest.mark.parametrize(
    "texts, asked, expected",
    [
        ({"a": "Das Haus und die Häuser sind alt.", "b": "Die Katze ist auf dem Dach."}, "Hause", ["a"]),
        ({"a": "Les chevaux et les maisons sont à nous.", "b": "Le chat est sur le toit."}, "maison", ["a"]),
        ({"a": "Насосы были починены в порту и на маяке.", "b": "Кошка на крыше."}, "насосами", ["a"]),
        ({"a": "The pumps were repaired by the keeper.", "b": "Die Katze ist auf dem Dach."}, "pump repairing", ["a"]),
        ({"a": "Las canciones de los niños son bonitas.", "b": "El gato está en el tejado."}, "canción niño", ["a"]),
    ],
)
def test_words_are_stemmed_by_the_language_of_their_text(search, texts, asked, expected):
    assert search(texts)(asked) == expected


def test_no_false_hits_in_hindi(search):
    found = search({"book": "यह एक किताब है और वह पुरानी है।", "other": "कल तब बारिश होगी और पानी भरेगा।"})
    assert found("किताब") == ["book"] and found("बारिश") == ["other"]
    assert found("कब") == found("ताब") == found("कताब") == []


def test_neighbouring_letters_are_looked_for_in_scripts_without_spaces(search):
    found = search({"ko": "학교에서 공부합니다.", "th": "ฉันไปโรงเรียน", "other": "교학 상장은 좋은 말이다."})
    assert found("학교") == ["ko"] and found("โรงเรียน") == ["th"] and found("교학") == ["other"]


def test_names_of_languages_are_three_terms(search):
    texts = {"c": "A compiler for C.", "cpp": "A compiler for C++17.", "cs": "A compiler for C#.", "both": "C/C++"}
    found = search({name: f"{text} It is fast." for name, text in texts.items()})
    assert sorted(found("C")) == ["both", "c"]
    assert sorted(found("C++")) == ["both", "cpp"] and found("C#") == ["cs"] and found("Ｃ＃") == ["cs"]
    assert found("What is C#?")[0] == "cs" and found("c++?")[0] in ("both", "cpp")


def test_identifiers_are_distinct_and_have_no_stems(search):
    names = ("getUser", "getUsers", "max_connection", "max_connections", "utf8", "utf8s", "libstdc++", "libstdc")
    found = search({name: f"The value of {name} is set in the file." for name in names})
    for name in names[:6]:
        assert found(name)[0] == name
    assert found("getUser") == ["getUser"] and found("utf8") == ["utf8"] and found("libstdc++") == ["libstdc++"]
    assert sorted(found("connections")) == ["max_connection", "max_connections"]
    assert found("what is max_connection")[0] == "max_connection"


def asked(text, languages=()):
    return fts_query(words_sought(text, languages))


def test_the_frequent_words_of_a_question_are_left_out_in_its_language():
    assert asked("Was kostet die Pumpe?", ["de"]).split(" OR ") == [
        '"pumpe"',
        '"pump+de"',
        '"kostet"',
        '"kost+de"',
    ]
    assert asked("die casting machine") == '"machine" OR "casting" OR "die"', "no question in German"
    assert asked("What is the WHO?") == '"who" OR "the" OR "is" OR "what"', "some words are left in any question"
    assert asked("Quelle est la durée?", ["fr", "en"]) == '"duree" OR "dur+fr" OR "dure+fr" OR "dure"'


@pytest.mark.parametrize("language", [*STEMS, "he", "uk"])
def test_a_sentence_shows_its_language(language):
    near = {"no": ("no", "da"), "ca": ("ca", "es"), "ro": ("ro",)}
    text = SENTENCES.get(language, "") + OTHERS.get(language, "")
    assert language_of(words_of(text)) in near.get(language, (language,))


OTHERS = {
    "cs": "Nikdo už nevěděl, co to bylo, ale jeho dům stál ještě u lesa.",
    "pl": "Nikt już nie wiedział, co to było, ale jego dom jeszcze stał przy lesie.",
    "uk": "Доглядач маяка щовечора запалює лампу, а вранці записує погоду для кораблів, що йдуть із порту та не знають її.",
    "da": "Han vidste ikke noget om det, og hun spurgte ham, hvad der skulle ske nu.",
    "hu": "Nem volt semmi más, csak egy kis ház, és az is az erdőben állt, de ezt már senki nem tudta.",
    "tr": "Bu çok güzel bir ev ama onun için daha fazla para gerekiyor ve kimse yok.",
    "ca": "El guarda del far va reparar les bombes abans que arribessin les tempestes de l'hivern, però no amb això.",
    "no": "Fyrvokteren hadde reparert pumpene før høststormene kom fra havet, men han visste ikke noe om det.",
    "ro": "Paznicul farului a reparat pompele înainte să vină furtunile de iarnă din nord, dar nu și pe cele din port.",
}


@pytest.mark.parametrize("text", ["", "0x7f 42 17", "x = y(z)", "東京都", "Lorem ipsum dolor sit amet consectetur"])
def test_a_text_without_frequent_words_has_no_language(text):
    assert language_of(words_of(text)) == ""


@pytest.mark.parametrize(("before", "expected"), [("da", "da"), ("no", "no"), ("en", "da")])
def test_a_text_that_may_be_in_two_languages_is_in_that_of_the_text_before_it(before, expected):
    words = ["den", "er", "det", "og", *(f"rigg{number}" for number in range(12))]
    assert language_of(words, before=before) == expected


def test_words_are_as_frequent_in_one_spelling():
    for language, words in languages.WORDS.items():
        assert len(words.split()) >= 45, language


@given(st.text(max_size=60), st.sampled_from(["", *STEMS]))
def test_what_is_sought_for_a_word_is_in_its_terms(text, language):
    """Whatever the letters are, a text has what is sought for each of its words."""
    words = words_of(text)
    made = f" {terms_of(words, language)} "
    for word in words:
        for spellings in sought(word, [language] if language else []):
            assert any(f" {spelling} " in made for spelling in spellings), word


@given(st.text(max_size=60))
def test_folding_twice_is_folding_once(text):
    assert fold(fold(text)) == fold(text)


def test_a_question_costs_no_more_than_its_size():
    """Work is counted by the terms it makes: marks without end, one long word, letters without spaces."""
    for unit in ("a", "a\u0301\u0323", "\u0301\u0323", "語", "ก็", "a_", "C++", "é ", "\ufdfa"):
        small, large = (len(terms_of(words_of(unit * size), "en")) for size in (1000, 4000))
        assert large <= 4.1 * small + 40, unit
        assert asked(unit * 100_000, [*STEMS]).count(" OR ") < 64 * (1 + len(STEMS))
