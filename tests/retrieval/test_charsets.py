"""Files in the encodings that people have: read as they were written, damaged ones as far as they go, else a reason."""

import pytest
from slotcache.retrieval.charsets import codec_of, decode, label_of
from slotcache.retrieval.html import read_html
from slotcache.retrieval.outline import Outline, Unreadable

TEXTS = {
    "zh": "港口的灯塔建于一八七四年,由工程师设计。守塔人每天晚上点灯,早晨记录天气和潮汐,然后把报告交给船长。\n",
    "zh-tw": "港口的燈塔建於一八七四年,由工程師設計。守塔人每天晚上點燈,早晨記錄天氣和潮汐,然後把報告交給船長。\n",
    "ja": "港の灯台は千八百七十四年に建てられた。灯台守は毎晩ランプをともし、朝には天気と潮の記録を船長に渡します。\n",
    "ko": "항구의 등대는 천팔백칠십사년에 세워졌다. 등대지기는 매일 밤 등불을 켜고 아침에는 날씨와 조수를 기록한다.\n",
    "ru": "Смотритель маяка каждый вечер зажигает лампу, а утром записывает погоду и отдаёт отчёт капитану корабля.\n",
    "el": "Ο φύλακας του φάρου ανάβει κάθε βράδυ τη λάμπα και το πρωί γράφει τον καιρό στο ημερολόγιο του πλοίου.\n",
    "pl": "Latarnik każdego wieczoru zapala lampę, a rano zapisuje pogodę i przekazuje ją żeglarzom w porcie.\n",
    "de": "Der Wärter zündet jeden Abend die Lampe an und schreibt früh das Wetter für die Schiffe auf: größere Stürme.\n",
    "fr": "Le gardien du phare allume la lampe chaque soir et note à l'aube la météo pour les bateaux égarés.\n",
    "tr": "Fener bekçisi her akşam ışığı yakar, sabahları hava gemiler için deftere yazar, ama bu iş kolay değil.\n",
    "he": "שומר המגדלור מדליק את המנורה בכל ערב ורושם בבוקר את מזג האוויר עבור האוניות בנמל.\n",
    "ar": "يشعل حارس المنارة المصباح كل مساء ويكتب في الصباح حالة الطقس للسفن في الميناء.\n",
}
ENCODINGS = [
    *(("zh", "gbk"), ("zh", "gb18030"), ("zh", "gb2312"), ("zh-tw", "big5"), ("ja", "shift_jis"), ("ja", "euc_jp")),
    *(("ja", "iso2022_jp"), ("ko", "euc_kr"), ("ru", "cp1251"), ("ru", "koi8_r"), ("el", "cp1253"), ("pl", "cp1250")),
    *(("ja", "utf-32"), ("de", "cp1252"), ("fr", "cp1252"), ("tr", "cp1254"), ("he", "cp1255"), ("ar", "cp1256")),
    *(
        (language, encoding)
        for language in ("de", "ru", "ja")
        for encoding in ("utf-16-le", "utf-16-be", "utf-16", "utf-32")
    ),
]


@pytest.mark.parametrize("language, encoding", ENCODINGS)
def test_a_text_is_read_as_it_was_written(language, encoding):
    text = 5 * TEXTS[language].replace("ё", "е")
    assert decode(text.encode(encoding)) == text


def test_one_bad_byte_changes_one_letter():
    data = "Die Straße zum Hafen ist für Fuhrwerke gesperrt.".encode()
    assert decode(data + b"\xff\n") == "Die Straße zum Hafen ist für Fuhrwerke gesperrt.\ufffd\n"
    assert decode(data[:-30] + b"\xe2\x82" + data[-30:]).count("\ufffd") == 1
    assert decode(b"\xff" + "東京".encode()) == "\ufffd東京"
    assert "Straße" in decode("Die Straße, für".encode("cp1252") * 20)


@pytest.mark.parametrize(
    "data", [b"\x7fELF\0\0", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", bytes(range(128, 256)) + b"\x01\x02\x03\x04" * 9]
)
def test_binary_data_is_no_text(data):
    with pytest.raises(Unreadable, match="binary"):
        decode(data)


def test_an_unknown_encoding_is_named_as_the_reason(monkeypatch):
    monkeypatch.setattr("slotcache.retrieval.charsets.GUESSED", ("cp932",))
    with pytest.raises(Unreadable, match="its encoding is not known: save it as UTF-8"):
        decode(b"\xa0\xfd\xff caf\xe9 \xfd" * 50)


@pytest.mark.parametrize(
    "label, codec",
    [
        *(("iso-8859-1", "cp1252"), ("Latin1", "cp1252"), ("us-ascii", "cp1252"), ("windows-1252", "cp1252")),
        *(
            ("gb2312", "gb18030"),
            ("GBK", "gb18030"),
            ("x-gbk", "gb18030"),
            ("gb_2312-80", "gb18030"),
            ("chinese", "gb18030"),
        ),
        *(("shift_jis", "cp932"), ("x-sjis", "cp932"), ("windows-31j", "cp932"), ("euc-kr", "cp949")),
        *(("ks_c_5601-1987", "cp949"), ("big5", "big5hkscs"), ("iso-8859-9", "cp1254"), ("latin5", "cp1254")),
        *(("tis-620", "cp874"), ("koi8-u", "koi8-u"), ("utf-16", "utf-8"), ("utf8", "utf-8"), ("x-cp1251", "cp1251")),
        *(("iso-8859-2", "iso8859-2"), (" UTF-8 ", "utf-8"), ("no such encoding", ""), ("hex", ""), ("utf-7", ""), ("", "")),
    ],
)
def test_labels_mean_what_browsers_take_them_for(label, codec):
    assert codec_of(label) == codec


@pytest.mark.parametrize(
    "page, label",
    [
        ('<meta charset="gbk">', "gbk"),
        ("<META http-equiv=Content-Type content='text/html; charset=iso-8859-1'>", "iso-8859-1"),
        (f"<script>{'x = 1;' * 2000}</script><meta charset=koi8-r>", "koi8-r"),
        ("<!-- <meta charset=utf-8> --><meta charset=big5>", "big5"),
        ("<script>'<meta charset=utf-8>'</script ><style>a</style><meta charset=euc-kr>", "euc-kr"),
        ('<meta name="viewport" content="width=1"><meta charset=\'shift_jis\'>', "shift_jis"),
        ("<title>charset=no</title><p>charset=no</p>", ""),
        ("<!-- <meta charset=utf-8>", ""),
        ("<script><meta charset=utf-8>", ""),
        ("<meta charset", ""),
    ],
)
def test_a_page_names_its_encoding(page, label):
    assert label_of(f"<html><head>{page}".encode()) == label


def test_an_xml_declaration_names_the_encoding():
    assert label_of(b"<?xml version='1.0' encoding='windows-1251'?><html>") == "windows-1251"
    assert label_of(b'\n<?xml version="1.0" encoding="koi8-r" standalone="yes"?>') == "koi8-r"


@pytest.mark.parametrize("label, text", [("iso-8859-1", "“Größe” – ‘ñ’"), ("gb2312", "灯塔 镕"), ("windows-1251", "Маяк")])
def test_a_page_is_read_in_the_encoding_that_it_names(label, text):
    page = f"<script>{'x = 1;' * 2000}</script><meta charset={label}><p>{text}</p>"
    outline = Outline()
    read_html(page.encode(codec_of(label)), outline)
    assert [block.text for section in outline.sections for block in section.blocks] == [text]


@pytest.mark.parametrize("unit", [b"<!--", b"<script>", b"<meta ", b"<meta charset", b"<title><!--", b"<"])
def test_the_search_for_a_label_ends(unit):
    """Nothing is searched twice: a page of two million openings takes as long as one of text."""
    assert label_of(unit * (2_000_000 // len(unit))) == ""
