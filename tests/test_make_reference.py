"""scripts/make_reference.py: continuous weights that still round to the codes they came from."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from make_reference import CODES, main, make_reference, steps
from twofold import errors
from twofold.convert import convert
from twofold.source import Source

SUBBLOCK = {"q2_k": 16, "q3_k": 16, "q6_k": 16}


def quantized(kind: str, source: Path, folder: Path) -> Path:
    """Return a GGUF file whose matrices have this type."""
    return convert(source, folder / kind, base_type=kind, bits=4).base


@pytest.fixture(scope="module", params=list(CODES))
def files(request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp(request.param)
    source = quantized(request.param, tiny_llama, folder)
    make_reference(source, folder / "reference.gguf")
    return [source, folder / "reference.gguf"]


def gaps(levels: np.ndarray, size: int) -> np.ndarray:
    """Smallest distance of different values in each sub-block; 0 where all are alike."""
    ordered = np.sort(levels.reshape(-1, size).astype(np.float64), axis=1)
    between = np.diff(ordered, axis=1)
    between[between <= 1e-6 * np.abs(ordered).max(axis=1, keepdims=True)] = np.inf
    smallest = between.min(axis=1, keepdims=True)
    return np.where(np.isfinite(smallest), smallest, 0)


def test_steps_are_the_distance_of_levels(files: list[Path]) -> None:
    """Against what the values themselves show: gaps are whole numbers of steps, mostly one."""
    for tensor in Source(files[0]).tensors.values():
        if tensor.kind.name in CODES:
            size = SUBBLOCK.get(tensor.kind.name, 32)
            found = steps(np.array(tensor.data), tensor.kind, tensor.shape).reshape(-1, size)
            assert (found == found[:, :1]).all() or tensor.kind.name not in ("q4_0", "q8_0")
            gap = gaps(tensor.rows(0, tensor.shape[0]), size)
            known = (gap[:, 0] > 0) & (found[:, 0] > 0)
            ratio = gap[known, 0] / found[known].mean(axis=1)
            assert known.mean() > 0.99
            np.testing.assert_allclose(ratio, np.rint(ratio), atol=2e-2)
            assert np.median(ratio) == pytest.approx(1, abs=1e-2)


def test_weights_are_continuous_and_within_half_a_step(files: list[Path]) -> None:
    before, after = Source(files[0]).tensors, Source(files[1]).tensors
    assert list(before) == list(after)
    spread = 0
    for name, tensor in before.items():
        if tensor.kind.name not in CODES:
            assert after[name].kind == tensor.kind
            np.testing.assert_array_equal(after[name].data, tensor.data)
            continue
        spread += 1
        assert after[name].kind.name == "f16"
        levels, found = (t.rows(0, t.shape[0]).astype(np.float64) for t in (tensor, after[name]))
        step = steps(np.array(tensor.data), tensor.kind, tensor.shape).astype(np.float64)
        live = step > 0
        places = (found - levels)[live] / step[live]
        assert np.abs(places).max() < 0.5  # so rounding to the nearest level gives the same code
        assert np.abs(places.mean()) < 0.01
        assert places.std() == pytest.approx(12**-0.5, rel=0.02)
        counts = np.histogram(places, 10, (-0.5, 0.5))[0]
        assert counts.min() > 0.8 * counts.mean()
        np.testing.assert_allclose(found[~live], levels[~live], rtol=1e-3)
        assert len(np.unique(found)) > 3 * len(np.unique(levels)) or len(np.unique(levels)) > 3000
    assert spread > 10


def test_the_keys_stay(files: list[Path]) -> None:
    def keys(path: Path) -> dict[str, object]:
        return {name: f.contents() for name, f in gguf.GGUFReader(path).fields.items() if not name.startswith("GGUF.")}

    before, after = keys(files[0]), keys(files[1])
    assert after["general.file_type"] == 1
    assert {k for k in before if k not in after} == {"twofold.format_version"}
    assert {k for k in after if after[k] != before.get(k)} <= {"general.file_type"}


def test_the_seed_decides(tiny_llama: Path, tmp_path: Path) -> None:
    source = quantized("q4_k", tiny_llama, tmp_path)
    for name, seed in (("one", 1), ("again", 1), ("two", 2)):
        assert main([str(source), str(tmp_path / name), "--seed", str(seed)]) == 0
    one, again, two = ((tmp_path / name).read_bytes() for name in ("one", "again", "two"))
    assert one == again
    assert one != two


def test_what_cannot_be_done_is_refused(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(errors.ArgumentError, match="nothing in it is quantized"):
        make_reference(tiny_llama, tmp_path / "out.gguf")
    source = quantized("iq4_nl", tiny_llama, tmp_path)
    assert main([str(source), str(tmp_path / "out.gguf")]) == 1
    assert "types iq4_nl cannot be spread, only q4_0, q4_1" in capsys.readouterr().err
    source = quantized("q4_0", tiny_llama, tmp_path)
    with pytest.raises(errors.ArgumentError, match="is the source itself"):
        make_reference(source, source, force=True)
    with pytest.raises(SystemExit):
        main([str(source), str(tmp_path / "out.gguf"), "--seed", "-1"])
    assert not (tmp_path / "out.gguf").exists()
