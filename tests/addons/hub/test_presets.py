"""Presets of KerasHub: read into the parts that ranks keep, and saved as plain ones."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from tests.addons.hub import programs
from tests.conftest import on_ranks, slow_but

pytest.importorskip("keras_hub")

TENSOR = {"mesh": {"data": 1, "tensor": 2}}
ZERO = {"zero_stage": 3}


def check(found: dict, right: dict) -> None:
    assert list(found) == list(right)
    for path, value in right.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


@on_ranks(("horovod", 2))
@pytest.mark.parametrize(
    "options", slow_but([TENSOR], [TENSOR, ZERO, {}]), ids=["tensor", "zero", "data"]
)
@pytest.mark.parametrize(
    ("name", "dtype", "parts"),
    [
        ("Llama", "float32", True),
        pytest.param("GPT2", "bfloat16", False, marks=pytest.mark.slow),
        pytest.param("Gemma", "bfloat16", True, marks=pytest.mark.slow),
    ],
)
def test_ranks_read_what_they_keep(pool, one_process, tmp_path, name, dtype, parts, options):
    folder = str(tmp_path / "preset")
    (right,) = one_process.run(programs.make_preset, name, folder, dtype, parts, timeout=120)
    assert (tmp_path / "preset" / "model.weights.json").exists() == parts
    kwargs = {"dtype": dtype}
    ((alone, bytes_alone, outputs),) = one_process.run(
        programs.loaded, folder, None, timeout=120, **kwargs
    )
    check(alone, right)
    for found, held, own_outputs in pool.run(
        programs.loaded, folder, options, timeout=120, **kwargs
    ):
        check(found, right)
        rounding = (1e-5 if dtype == "float32" else 0.1) * np.abs(outputs).max()
        np.testing.assert_allclose(own_outputs, outputs, atol=rounding)
        assert held < (0.7 if options else 1.01) * bytes_alone


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("options", [TENSOR, ZERO], ids=["tensor", "zero"])
def test_kerashub_itself_loads_in_the_scope(pool, one_process, tmp_path, options):
    folder = str(tmp_path / "preset")
    one_process.run(programs.make_preset, "Llama", folder, "float32", timeout=120)
    ((right, _),) = one_process.run(programs.loaded_by_hub, folder, None, timeout=120)
    for before, after in pool.run(programs.loaded_by_hub, folder, options, timeout=120):
        np.testing.assert_allclose(before, right, atol=1e-5 * np.abs(right).max())
        np.testing.assert_allclose(after, right, atol=1e-5 * np.abs(right).max())


@on_ranks(("horovod", 2))
@pytest.mark.parametrize("options", [TENSOR, pytest.param(ZERO, marks=pytest.mark.slow)])
def test_a_saved_preset_is_plain(pool, one_process, tmp_path, options):
    folder, again = str(tmp_path / "preset"), str(tmp_path / "again")
    (right,) = one_process.run(programs.make_preset, "Llama", folder, "float32", timeout=120)
    pool.run(programs.saved_again, folder, again, options, timeout=120)
    shutil.rmtree(folder)
    ((found, _, _),) = one_process.run(programs.loaded, again, None, timeout=120)
    check(found, right)


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("options", [TENSOR, ZERO])
def test_adapters_are_kerashubs_own(pool, one_process, tmp_path, options):
    path, plain = str(tmp_path / "a.lora.h5"), str(tmp_path / "b.lora.h5")
    saved = pool.run(programs.adapted, path, options, False, timeout=120)
    (read,) = one_process.run(programs.adapted, path, None, True, timeout=120)
    (right,) = one_process.run(programs.adapted, plain, None, False, timeout=120)
    assert len(read) == 8
    for found in (*saved, read):
        for name, value in right.items():
            np.testing.assert_allclose(found[name], value, atol=1e-5, err_msg=name)
    for found in pool.run(programs.adapted, plain, options, True, timeout=120):
        check(found, right)


@on_ranks(("horovod", 2))
def test_a_split_model_with_lora_reads_a_file_of_the_whole(pool, one_process, tmp_path):
    path = str(tmp_path / "whole.weights.h5")
    (right,) = one_process.run(programs.weights_reloaded, path, None, timeout=120)
    for found in pool.run(programs.weights_reloaded, path, TENSOR, timeout=120):
        np.testing.assert_equal(list(found.values()), list(right.values()))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@on_ranks(("horovod", 4))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_never_holds_the_whole(pool, one_process, tmp_path, dtype):
    """The shard, the largest weight, and a tenth: of 350 million parameters on four ranks."""
    folder = str(tmp_path / "preset")
    one_process.run(programs.make_large_preset, folder, dtype, timeout=300)
    for options in ({"mesh": {"data": 1, "tensor": 4}}, ZERO):
        for grown, held, largest in pool.run(
            programs.memory_of_loading, folder, options, dtype, timeout=600
        ):
            assert grown <= 1.1 * (held + largest), (options, grown, held, largest)
            assert held < 0.4 * programs.LARGE_PARAMETERS * (4 if dtype == "float32" else 2), held


def test_a_folder_without_a_preset_is_refused(tmp_path):
    import tfdist

    with pytest.raises(ValueError, match=r"config.json and model.weights.h5"):
        tfdist.load_preset(tmp_path)
