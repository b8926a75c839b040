"""The calibration file: ours read by gguf-py, llama.cpp's read by us, and what neither is."""

from __future__ import annotations

import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest

from twofold import blocks, calibration, errors
from twofold.calibration import Calibration
from twofold.collector import Sums
from twofold.feedback import Factor
from twofold.rounding import Rounding

RNG = np.random.default_rng(5)
Q, K, UP = "blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.ffn_up_exps.weight"


def squares(experts: int, width: int) -> np.ndarray:
    return RNG.random((experts, width)).astype(np.float32) + 0.5


def moments(blocks: int, width: int) -> np.ndarray:
    x = RNG.standard_normal((blocks, width, width)).astype(np.float32)
    return x @ x.transpose(0, 2, 1)


@pytest.fixture
def made() -> Calibration:
    counts = np.array([4, 0, 12], np.float32)
    sums = {Q: Sums(squares(1, 64), np.array([16], np.float32)), UP: Sums(squares(3, 64), counts)}
    sums[K] = sums[Q]
    sums[UP].squares[1] = 0
    return Calibration(
        sums, {Q: moments(2, 32)}, {Q: Q, K: Q}, {Q: 0.5, K: 0.25}, ["chat.txt", "code.txt"], chunks=3, chunk_tokens=128
    )


@pytest.fixture
def saved(made: Calibration, tmp_path: Path) -> Path:
    calibration.save(made, tmp_path / "made.gguf")
    return tmp_path / "made.gguf"


def llama_cpp_file(path: Path, arrays: dict[str, np.ndarray], **keys: object) -> Path:
    """Write what llama-imatrix writes: no architecture, no alignment, arrays in pairs."""
    writer = gguf.GGUFWriter(path, "none")
    writer.kv_data[0].clear()
    writer.add_string("general.type", "imatrix")
    writer.add_array("imatrix.datasets", ["wiki.train.raw"])
    writer.add_uint32("imatrix.chunk_count", 7)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ---- ours --------------------------------------------------------------------------------------------


def test_round_trip(made: Calibration, saved: Path) -> None:
    again = calibration.load(saved)
    assert again.sums.keys() == made.sums.keys()
    for name, sums in made.sums.items():
        np.testing.assert_array_equal(again.sums[name].squares, sums.squares)
        np.testing.assert_array_equal(again.sums[name].counts, sums.counts)
    np.testing.assert_array_equal(again.moments[Q], made.moments[Q])
    assert (again.moments_of, again.sensitivity) == (made.moments_of, made.sensitivity)
    assert (again.chunks, again.chunk_tokens, again.origin) == (3, 128, str(saved))
    assert (again.block(Q), again.block(K), again.block(UP)) == (32, 32, 0)


def test_one_block_of_moments_keeps_its_shape(made: Calibration, tmp_path: Path) -> None:
    made.moments[Q] = moments(1, 64)
    calibration.save(made, tmp_path / "one.gguf")
    assert calibration.load(tmp_path / "one.gguf").moments[Q].shape == (1, 64, 64)


def test_llama_cpp_finds_its_keys_and_tensors(made: Calibration, saved: Path) -> None:
    """Names, types and shapes as tools/imatrix/imatrix.cpp writes them and common/imatrix-loader.cpp wants them."""
    reader = gguf.GGUFReader(saved)
    assert reader.fields["general.type"].contents() == "imatrix"
    assert reader.fields["imatrix.datasets"].contents() == ["chat.txt", "code.txt"]
    for key, value in (("imatrix.chunk_count", 3), ("imatrix.chunk_size", 128)):
        assert reader.fields[key].types == [gguf.GGUFValueType.UINT32]
        assert reader.fields[key].contents() == value
    found = {t.name: t for t in reader.tensors}
    for name, sums in made.sums.items():
        experts, width = sums.squares.shape
        in_sum2, counts = found[name + ".in_sum2"], found[name + ".counts"]
        assert in_sum2.tensor_type == counts.tensor_type == gguf.GGMLQuantizationType.F32
        # A dimension of 1 at the end is none.
        assert list(in_sum2.shape) in ([width, experts], [width] if experts == 1 else [])
        assert list(counts.shape) in ([1, experts], [1] if experts == 1 else [])
        np.testing.assert_array_equal(in_sum2.data.reshape(experts, width), sums.squares)
        np.testing.assert_array_equal(counts.data.reshape(-1), sums.counts)
    ends = (".in_sum2", ".counts")
    assert {n.removesuffix(e) for n in found for e in ends if n.endswith(e)} == set(made.sums)


# ---- llama.cpp's -------------------------------------------------------------------------------------


def test_an_importance_matrix_of_llama_cpp(tmp_path: Path) -> None:
    dense, experts = squares(1, 96), squares(4, 64)
    counts = np.array([[512], [0], [100], [412]], np.float32)
    arrays = {f"{K}.in_sum2": dense, f"{K}.counts": np.array([[3584]], np.float32)}
    arrays |= {f"{UP}.in_sum2": experts, f"{UP}.counts": counts}
    found = calibration.load(llama_cpp_file(tmp_path / "imatrix.gguf", arrays))
    assert (found.chunks, found.chunk_tokens) == (7, 512)
    np.testing.assert_allclose(found.importance(K, 0), dense[0] / 3584, rtol=1e-6)
    np.testing.assert_allclose(found.importance(UP, 2), experts[2] / 100, rtol=1e-6)
    assert not found.moments and not found.moments_key(K)
    assert found.sensitivity_of(K) == 1.0


# ---- what is asked of it -----------------------------------------------------------------------------


def test_importance(made: Calibration) -> None:
    np.testing.assert_allclose(made.importance(Q, 0), made.sums[Q].squares[0] / 16, rtol=1e-6)
    np.testing.assert_allclose(made.importance(UP, 2), made.sums[UP].squares[2] / 12, rtol=1e-6)
    never_chosen = made.sums[UP].squares.sum(axis=0) / 16
    np.testing.assert_allclose(made.importance(UP, 1), never_chosen, rtol=1e-6)
    assert made.importance("blk.9.attn_q.weight", 0) is None
    made.sums[UP].counts[:] = 0
    assert made.importance(UP, 0) is None and not made.knows(UP)


def test_dead_inputs_have_a_little_importance(made: Calibration) -> None:
    """With none in a whole block ggml's quantizers would make it zero, whatever the weights."""
    made.sums[Q].squares[0, :32] = 0
    found = made.importance(Q, 0)
    assert found is not None and (found > 0).all() and found[:32].max() < 1e-5 * found[32:].min()
    made.sums[Q].squares[:] = 0
    assert (made.importance(Q, 0) == 1).all()


def test_the_tied_head_is_the_embedding(made: Calibration) -> None:
    made.sums["token_embd.weight"] = made.sums[Q]
    made.moments_of["token_embd.weight"] = Q
    made.sensitivity["token_embd.weight"] = 3.0
    assert made.knows("output.weight") and made.moments_key("output.weight") == Q
    assert made.sensitivity_of("output.weight") == 3.0
    np.testing.assert_array_equal(made.importance("output.weight", 0), made.importance(Q, 0))


@pytest.mark.parametrize(("experts", "width"), [(1, 96), (2, 64)])
def test_another_model_is_refused(made: Calibration, experts: int, width: int) -> None:
    made.check(Q, 1, 64, "model.gguf")
    with pytest.raises(errors.MismatchError) as caught:
        made.check(Q, experts, width, "model.gguf")
    for part in ("the calibration", "model.gguf", "width 64", f"width {width}", f"{experts} experts"):
        assert part in str(caught.value)


def test_a_sensitivity_that_is_missing_among_others(made: Calibration) -> None:
    with pytest.raises(errors.MismatchError, match=r"no sensitivity of blk\.0\.ffn_up_exps"):
        made.sensitivity_of(UP)


# ---- files that are none -----------------------------------------------------------------------------


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(errors.FileAccessError, match=r"none\.gguf"):
        calibration.load(tmp_path / "none.gguf")


def test_a_legacy_file(tmp_path: Path) -> None:
    name = Q.encode()
    data = struct.pack("<ii", 1, len(name)) + name + struct.pack("<ii", 2, 64) + squares(1, 64).tobytes()
    (tmp_path / "old.dat").write_bytes(data)
    with pytest.raises(errors.FormatError, match=r"old\.dat.*--in-file"):
        calibration.load(tmp_path / "old.dat")


@pytest.mark.parametrize("base", [False, True])
def test_a_model_is_none(base: bool, tiny_llama: Path, tiny_pair: Path) -> None:
    with pytest.raises(errors.FormatError, match=r"no importance matrix.*twofold calibrate"):
        calibration.load(tiny_pair if base else tiny_llama)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({f"{Q}.counts": None}, "64 sums, and 0 counts"),
        ({f"{Q}.counts": np.ones((3, 1), np.float32)}, "64 sums, and 3 counts"),
        ({f"{Q}.in_sum2": np.full((1, 64), np.nan, np.float32)}, "not finite"),
        ({f"{Q}.in_sum2": np.full((1, 64), -1, np.float32)}, "negative"),
        ({f"{Q}.in_moments": np.ones((2, 16, 16), np.float32)}, "in_moments has shape"),
        ({f"{K}.in_moments": np.ones((1, 64, 64), np.float32)}, "in_moments has shape"),
    ],
)
def test_damaged_files(damage: dict[str, np.ndarray | None], said: str, tmp_path: Path) -> None:
    arrays = {f"{Q}.in_sum2": squares(1, 64), f"{Q}.counts": np.ones((1, 1), np.float32), **damage}
    path = llama_cpp_file(tmp_path / "bad.gguf", {n: a for n, a in arrays.items() if a is not None})
    with pytest.raises(errors.FormatError, match=said):
        calibration.load(path)


def test_sums_of_another_type_are_none(tmp_path: Path) -> None:
    arrays = {f"{Q}.in_sum2": squares(1, 64).astype(np.float16), f"{Q}.counts": np.ones((1, 1), np.float32)}
    with pytest.raises(errors.FormatError, match="no float32 tensors"):
        calibration.load(llama_cpp_file(tmp_path / "half.gguf", arrays))


def test_experts_have_no_feedback_whatever_a_file_holds(made: Calibration) -> None:
    made.moments[UP], made.moments_of[UP] = moments(3, 64), UP
    rounding = Rounding(made, 64, 8)
    assert rounding.manner(UP, 3) == "importance" and rounding.manner(Q, 1) == "feedback"
    weights = squares(16, 64)
    np.testing.assert_array_equal(
        rounding.residual(weights, UP, 3).plane8, blocks.encode_residual(weights, 64, 8).plane8
    )


def test_damaged_moments_name_their_file(made: Calibration, tmp_path: Path) -> None:
    made.moments[Q][0, 3, 4] = np.nan
    calibration.save(made, tmp_path / "bad.gguf")
    with pytest.raises(errors.FormatError, match=rf"bad\.gguf.*{Q}.*not finite"):
        calibration.load(tmp_path / "bad.gguf").factor(K, 0.5)


def test_each_factor_is_worked_out_once_by_many_threads(made: Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while other factors push it out, and without waiting for theirs."""
    names = [f"blk.{i}.attn_q.weight" for i in range(6)]
    for name in names:
        made.sums[name], made.moments[name], made.moments_of[name] = made.sums[Q], moments(1, 64), name
    started, working, most = [], [], []

    def factor(self: Calibration, name: str, damping: float, *, largest_first: bool) -> Factor:
        started.append(name)
        working.append(name)
        time.sleep(0.05)
        most.append(len(working))
        working.remove(name)
        return Factor(self.moments[name], damping, largest_first=largest_first)

    monkeypatch.setattr(Calibration, "factor", factor)
    rounding = Rounding(made, 64, 8, workers=3)
    weights = squares(16, 64)
    with ThreadPoolExecutor(3) as pool:  # two chunks of each matrix, in order, as convert has them
        list(pool.map(lambda name: rounding.residual(weights, name, 1), [n for n in names for _ in range(2)]))
    assert sorted(started) == names
    assert max(most) >= 2
