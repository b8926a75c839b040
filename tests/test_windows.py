"""twofold.windows: texts as they are scored."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import pytest

from twofold import errors, windows

CTX, TOKENS = 64, 150
STORY = "The people look back at the first year, and they know which work would make good use of the time. "


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    (tmp_path / "story.txt").write_text(STORY * 8)
    (tmp_path / "code.txt").write_text("def work(first):\n    return print(first) == 10\nimport year\n" * 8)
    return sorted(tmp_path.iterdir())


def test_windows_hold_the_text_after_its_opening(tiny_llama: Path, texts: list[Path]) -> None:
    llama = llama_cpp.Llama(str(tiny_llama), vocab_only=True, verbose=False)
    found = windows.load_texts(texts, llama, CTX, TOKENS)
    assert [text.kind for text in found] == ["code", "story"]
    for text, path in zip(found, texts, strict=True):
        assert [len(window) for window in text.windows] == [CTX, CTX, TOKENS - 2 * (CTX - 1) + 1]
        assert all(window[0] == llama.token_bos() for window in text.windows)
        tokens = llama.tokenize(path.read_bytes(), add_bos=False)[:TOKENS]
        assert [token for window in text.windows for token in window[1:]] == tokens
        assert text.first == CTX // 4
        assert text.rows == 2 * (CTX - 1 - 16) + (TOKENS - 2 * (CTX - 1)) - 16
    llama.close()


def test_texts_that_cannot_be_scored_are_refused(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = llama_cpp.Llama(str(tiny_llama), vocab_only=True, verbose=False)
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (tmp_path / "all.txt").write_text(STORY)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "short.txt").write_text(STORY)

    def load(*names: str) -> None:
        windows.load_texts([tmp_path / name for name in names], llama, 64, 100)

    with pytest.raises(errors.ArgumentError, match=r"short\.txt: .* tokens; more than 17 are needed"):
        load("short.txt")
    with pytest.raises(errors.ArgumentError, match=r"latin\.txt: not UTF-8 \(byte 3\)"):
        load("latin.txt")
    with pytest.raises(errors.ArgumentError, match="another row of the results is called 'all'"):
        load("all.txt")
    with pytest.raises(errors.ArgumentError, match="called 'short'"):
        load("deep/short.txt", "short.txt")
    with pytest.raises(errors.FileAccessError, match=r"none\.txt: No such file"):
        load("none.txt")
    monkeypatch.setattr(windows, "BUNDLED", tmp_path / "none")
    with pytest.raises(errors.ArgumentError, match="no texts are installed; give some with --text"):
        windows.bundled_texts()
    monkeypatch.setattr(windows, "BUNDLED", tmp_path)
    assert [path.name for path in windows.bundled_texts()] == ["all.txt", "latin.txt", "short.txt"]
    llama.close()
