"""What the language model is trained on, and its tokenizer."""

import sysconfig
from pathlib import Path

import pytest
from recipes.byte_pairs import END, END_ID, train_tokenizer
from recipes.corpus import Corpus, python_documentation

LONG = "A sentence that is surely long enough to be more than a mere label of something, number "


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty standard library."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: {"stdlib": str(tmp_path)}[name])
    return tmp_path


def texts(corpus: Corpus) -> list[str]:
    """Both parts."""
    return [*corpus.training, *corpus.held_out]


def test_docstrings_and_topics_are_the_corpus(library: Path) -> None:
    """Of modules, classes and functions; what is short, broken, no docstring or not the library's is left out."""
    (library / "a.py").write_text(f'''"""{LONG}1"""\ndef f():\n    """{LONG}2"""\n    return "{LONG}3"\n''')
    (library / "b.py").write_text(f'''class C:\n    """{LONG}2"""\n    async def g(self):\n        """Short."""\n''')
    (library / "broken.py").write_text(f'"""{LONG}4"""\ndef')
    for folder, number in (("test", 5), ("site-packages", 6), ("pydoc_data", 7)):
        (library / folder).mkdir()
        (library / folder / "topics.py").write_text(f"topics = {{'x': '{LONG}{number}'}}")
    assert [f"{LONG}{number}" for number in (1, 2, 7)] == sorted(texts(python_documentation()))


def test_a_text_is_held_out_wherever_it_stands(library: Path) -> None:
    """About one of twenty is, by what it says."""
    functions = [f'def f{number}():\n    """{LONG}{number}"""\n' for number in range(400)]
    (library / "a.py").write_text("".join(functions))
    first = python_documentation()
    (library / "a.py").write_text("".join(functions[200:]))
    second = python_documentation()
    assert 8 <= len(first.held_out) <= 32
    assert 400 == len(set(texts(first)))
    assert set(second.held_out) == set(first.held_out) & set(texts(second))


def test_the_tokenizer_gives_back_any_text() -> None:
    """Also what it was not trained on; a text begins with the token that parts texts."""
    tokenizer = train_tokenizer(["return a list of the lists"] * 9, vocab_size=270)
    text = "größe 東京 🙂 \x00\t\n"
    ids = tokenizer.encode(text).ids
    assert (END_ID, END) == (ids[0], tokenizer.id_to_token(END_ID))
    assert text == tokenizer.decode(ids)
    assert len(tokenizer.encode(" list").ids) < 1 + len(" list")
    assert 270 == tokenizer.get_vocab_size()
