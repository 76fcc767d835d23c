"""Pages can be read: short sentences, and no page that is a book."""

from pathlib import Path

import pytest

from tests.docs import pages

MEAN = 18.0  # words a sentence
WORDS = 1500  # words a page
REFERENCE = (
    "docs/api/",
    "docs/results.md",
    "docs/refusals.md",
    "docs/out_of_the_box.md",
)  # looked up, not read
ALL = [path for path in pages.pages() if "notebook" not in path.parts]


@pytest.mark.parametrize("path", ALL, ids=pages.name)
def test_sentences_are_short(path: Path) -> None:
    found = pages.sentences(path.read_text())
    mean = sum(map(len, found)) / max(len(found), 1)
    longest = sorted(found, key=len)[-3:]
    assert mean <= MEAN, f"{mean:.1f} words a sentence; the longest: " + "\n".join(map(" ".join, longest))


@pytest.mark.parametrize("path", ALL, ids=pages.name)
def test_pages_are_short(path: Path) -> None:
    if not pages.name(path).startswith(REFERENCE):
        assert pages.words(path.read_text()) <= WORDS


def test_sentences_are_counted_as_a_reader_would() -> None:
    text = """# A heading of no account

One two three four. Five `of code()` seven! See [the page](x.md) now.

- An item of five words

| a | table |

```python
not.prose()
```
"""
    assert [len(words) for words in pages.sentences(text)] == [4, 3, 4, 5]
    assert pages.words("one `two()` three\n```\nfour\n```\n") == 3
