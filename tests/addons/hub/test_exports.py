"""Exports to the files of transformers: from each layout the model that transformers computes."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from tests.addons.hub import exports
from tests.conftest import on_ranks, slow_but

pytest.importorskip("keras_hub")
pytest.importorskip("safetensors")

ROOT = Path(__file__).parents[3]
#: Where `make peers` puts transformers.
TRANSFORMERS = ROOT / ".peers" / "torch" / "bin" / "python"
ALL = [pytest.param(name, exports.KINDS, marks=pytest.mark.slow) for name in exports.FAMILIES]


def check(one_process, name: str, folder: Path, kinds: list[str]) -> None:
    """What plain KerasHub reads computes the logits of transformers."""
    golden = exports.golden(name)
    for kind in kinds:
        (found,) = one_process.run(exports.reimported, name, str(folder / kind), timeout=120)
        np.testing.assert_allclose(found, golden[f"logits/{kind}"], atol=1e-5, err_msg=kind)
        files = {file.name for file in (folder / kind).iterdir()}
        assert {"config.json", "model.safetensors"} <= files <= exports.FILES


def check_said(
    said: dict[str, list[str]], kinds: list[str], *, chief: bool, compared: bool
) -> None:
    for kind in kinds:
        if "int8" not in kind:
            assert not said[kind]
            continue
        assert "quantized to int8" in said[kind][0] and "dequantize=True" in said[kind][0]
        assert len(said[kind]) == 1 + chief
        if chief:
            words = "differ by" if compared else "were not compared"
            assert words in said[kind][1]
            print(kind, said[kind][1])


@pytest.mark.parametrize(("name", "kinds"), [("Gemma", ["lora"]), *ALL])
def test_one_process(one_process, tmp_path, name, kinds):
    checkpoint = exports.write_checkpoint(name, tmp_path / "checkpoint")
    (said,) = one_process.run(
        exports.exported, name, checkpoint, str(tmp_path), {}, kinds, timeout=240
    )
    check(one_process, name, tmp_path, kinds)
    check_said(said, kinds, chief=True, compared=True)


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize(
    "layout",
    [
        "tensor",
        pytest.param("zero", marks=pytest.mark.slow),
        pytest.param("pipeline", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("name", "kinds"), [("Gemma", ["lora on int8"]), *ALL])
def test_ranks(pool, one_process, tmp_path, name, layout, kinds):
    checkpoint = exports.write_checkpoint(name, tmp_path / "checkpoint")
    options = exports.LAYOUTS[layout]
    said = pool.run(exports.exported, name, checkpoint, str(tmp_path), options, kinds, timeout=400)
    check(one_process, name, tmp_path, kinds)
    for rank, own in enumerate(said):
        check_said(own, kinds, chief=rank == 0, compared=layout != "pipeline")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pool", "layout"),
    [
        (("horovod", 2), "tensor"),
        (("tensorflow", 2), "pipeline"),
        (("tensorflow", 2), "zero"),
        (("horovod", 3), "zero"),
    ],
    indirect=["pool"],
    ids=["horovod-2-tensor", "tensorflow-2-pipeline", "tensorflow-2-zero", "horovod-3-zero"],
)
def test_trained_adapters_leave_by_a_callback(pool, one_process, tmp_path, layout):
    """Neither rows nor shards divide by three."""
    name = "Qwen"
    checkpoint = exports.write_checkpoint(name, tmp_path / "checkpoint")
    ours, plain = tmp_path / "ours", tmp_path / "plain"
    (right,) = one_process.run(exports.trained, name, checkpoint, str(plain), None, timeout=240)
    pool.run(exports.trained, name, checkpoint, str(ours), exports.LAYOUTS[layout], timeout=300)
    (found,) = one_process.run(exports.reimported, name, str(ours / "1"), timeout=120)
    np.testing.assert_allclose(found, right, atol=1e-5)
    before, after = (exports.tensors(str(ours / each)) for each in ("0", "1"))
    changed = [path for path, value in after.items() if np.abs(value - before[path]).max() > 1e-4]
    assert changed == [f"model.layers.{n}.self_attn.{p}_proj.{w}" for n in (0, 1) for p, w in PARTS]
    backbone = exports.tensors(str(ours / "backbone"))
    assert set(after) - set(backbone) == {"lm_head.weight"}
    for path, value in backbone.items():
        np.testing.assert_array_equal(value, after[path])


PARTS = [("q", "bias"), ("q", "weight"), ("v", "bias"), ("v", "weight")]


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("name", ["GPT2", "Gemma3"])
def test_functions_and_backbones(pool, one_process, tmp_path, name):
    checkpoint = exports.write_checkpoint(name, tmp_path / "checkpoint")
    options = exports.LAYOUTS["tensor"]
    pool.run(exports.exported_otherwise, name, checkpoint, str(tmp_path), options, timeout=240)
    whole = exports.tensors(str(tmp_path / "function"))
    for kind in ("function", "early"):
        (found,) = one_process.run(exports.reimported, name, str(tmp_path / kind), timeout=120)
        np.testing.assert_allclose(found, exports.golden(name)["logits/lora"], atol=1e-5)
    backbone = exports.tensors(str(tmp_path / "backbone"))
    # transformers calls the parts of a Gemma 3 without a head by shorter names.
    prefix = "model." if name == "Gemma3" else ""
    assert {f"{prefix}{path}" for path in backbone} == set(whole) - {"lm_head.weight"}
    for path, value in backbone.items():
        np.testing.assert_array_equal(value, whole[f"{prefix}{path}"])


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("layout", ["one", "tensor"])
@pytest.mark.parametrize(
    ("mode", "block_size", "rounding"), [("int8", None, 0.1), ("int4", -1, 0.1), ("int4", 2, 1e-5)]
)
@pytest.mark.parametrize("name", ["Llama3", "Qwen"])
def test_quantized_tables(pool, one_process, tmp_path, name, mode, block_size, rounding, layout):
    """Llama's has another table for the way back. What also rounds inputs, differs by that."""
    checkpoint = exports.write_checkpoint(name, tmp_path / "checkpoint")
    folder = str(tmp_path / "exported")
    arguments = name, checkpoint, folder, exports.LAYOUTS[layout], mode, block_size
    ranks = one_process if layout == "one" else pool
    right, *_ = ranks.run(exports.exported_quantized, *arguments, timeout=240)
    (found,) = one_process.run(exports.reimported, name, folder, timeout=120)
    assert np.abs(found - right).max() < rounding * right.std()
    most = 127 if mode == "int8" else 7
    table = exports.golden(name)["weights/model.embed_tokens.weight"].astype("float32")
    if block_size != 2:
        scale = most / (np.abs(table).max(-1, keepdims=True) + 1e-7)
        expected = np.round(table * scale) / scale
        written = exports.tensors(folder)["model.embed_tokens.weight"]
        np.testing.assert_allclose(written, expected, atol=1e-5)


def test_a_folder_that_cannot_be_written_is_an_error(one_process, tmp_path):
    checkpoint = exports.write_checkpoint("Qwen", tmp_path / "checkpoint")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        one_process.run(
            exports.exported, "Qwen", checkpoint, str(tmp_path / "file"), {}, ["plain"], timeout=120
        )


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("layout", slow_but(["zero"], ["tensor", "zero", "pipeline"]))
def test_a_folder_that_the_chief_cannot_write_is_an_error_of_all(pool, tmp_path, layout):
    checkpoint = exports.write_checkpoint("Qwen", tmp_path / "checkpoint")
    (tmp_path / "file").touch()
    options = exports.LAYOUTS[layout]
    before = time.monotonic()
    results = pool.run(
        exports.raised_by_export, "Qwen", checkpoint, str(tmp_path / "file"), options, timeout=120
    )
    print(f"{time.monotonic() - before:.1f} s")
    for rank, (kind, notes) in enumerate(results):
        assert kind == "NotADirectoryError", results
        assert rank == 0 or "Rank 0 raised this in" in notes[0], results


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "bfloat16"])
@pytest.mark.parametrize("name", ["Llama3", "Gemma3"])
def test_policies(pool, one_process, tmp_path, name, dtype):
    """The file is of the dtype of the weights, whatever the model computes in, and so says its config."""
    checkpoint = exports.write_checkpoint(name, tmp_path / "checkpoint")
    options = exports.LAYOUTS["tensor"]
    pool.run(
        exports.exported, name, checkpoint, str(tmp_path), options, ["lora"], dtype, timeout=240
    )
    dtypes = {str(value.dtype) for value in exports.tensors(str(tmp_path / "lora")).values()}
    expected = dtype.removeprefix("mixed_") if not dtype.startswith("mixed") else "float32"
    assert dtypes == {expected}
    assert exports.config_of(str(tmp_path / "lora"))["torch_dtype"] == expected
    if expected == "float32":
        check(one_process, name, tmp_path, ["lora"])


@on_ranks(("tensorflow", 2))
def test_ranks_export_a_tokenizer_at_once(pool, tmp_path):
    pool.run(exports.tokenizers_exported, str(tmp_path), {}, 5, timeout=120)
    tokenizer = {"merges.txt", "tokenizer_config.json", "vocab.json"}
    folders = list(tmp_path.iterdir())
    assert len(folders) == 11
    for folder in folders:
        model = {"config.json", "model.safetensors"} if folder.name == "task" else set()
        assert {file.name for file in folder.iterdir()} == tokenizer | model
        assert json.loads((folder / "vocab.json").read_text())["ab"] == 3
    # That of the tokenizer, and not GPT-2's own.
    assert exports.config_of(str(tmp_path / "task"))["eos_token_id"] == 0


REFUSED = {
    "gemma 7b": ("num_key_value_heads=1", "Received: num_key_value_heads=2"),
    "gemma with wide heads": ("num_query_heads * head_dim = hidden_dim", "2 * 4 and hidden_dim=4"),
    "gemma 2": ("use_post_ffw_norm=False", "Received: use_post_ffw_norm=True"),
    "gemma 3 without norms": ("use_post_ffw_norm=True", "Received: use_post_ffw_norm=False"),
    "windows of qwen": ("use_sliding_window_attention=False", "save_to_preset"),
    "gemma 4 that ends locally": ("a last layer of full_attention", "Received: sliding_attention"),
    "llama 2": ("Llama3Backbone, ", "with LlamaBackbone", "save_to_preset"),
    "float8": ("'float8' in `transformer_layer_0/", "with Keras 3", "save_to_preset"),
    "int8": ("quantized to int8", "dequantize=True", "save_to_preset"),
}


@pytest.mark.parametrize(
    "kinds",
    [["gemma 2", "int8"], pytest.param(list(REFUSED), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_what_would_be_another_model_is_refused_in_one_line(one_process, tmp_path, kinds):
    (found,) = one_process.run(exports.refused, kinds, {}, str(tmp_path / "new"), timeout=120)
    for kind in kinds:
        for words in REFUSED[kind]:
            assert words in found[kind], found[kind]
        assert "\n" not in found[kind]
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


@on_ranks(("horovod", 2))
@pytest.mark.parametrize(
    "layout",
    [
        "tensor",
        pytest.param("zero", marks=pytest.mark.slow),
        pytest.param("pipeline", marks=pytest.mark.slow),
    ],
)
def test_adapters_keep_biases_that_train(pool, one_process, tmp_path, layout):
    checkpoint = exports.write_checkpoint("Qwen", tmp_path / "checkpoint")
    ours, plain = (str(tmp_path / f"{each}.lora.h5") for each in ("ours", "plain"))
    options = exports.LAYOUTS[layout]
    arguments = "Qwen", checkpoint
    ((right, said),) = one_process.run(exports.with_biases, *arguments, plain, {}, False)
    assert len(right) == 12 and any("bias" in path for path in right)
    assert len(said) == 1 and "4 weights in addition to the adapter" in said[0]
    assert "plain KerasHub does not" in said[0] and "/bias`" in said[0]
    pool.run(exports.with_biases, *arguments, ours, options, False, timeout=120)
    for path in (ours, plain):
        (read,) = one_process.run(exports.with_biases, *arguments, path, {}, True)
        own = pool.run(exports.with_biases, *arguments, path, options, True, timeout=120)
        for found, said in (read, *own):
            assert not said
            assert list(found) == list(right)
            for name, value in right.items():
                np.testing.assert_array_equal(found[name], value.astype("float32"), err_msg=name)


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("layout", exports.LAYOUTS)
@pytest.mark.parametrize("name", exports.FAMILIES)
def test_transformers_reads_what_ranks_export(pool, tmp_path, name, layout):
    if not TRANSFORMERS.exists():
        pytest.skip("transformers is not installed: `make peers` makes its environment.")
    checkpoint = exports.write_checkpoint(name, tmp_path / "checkpoint")
    options = exports.LAYOUTS[layout]
    arguments = name, checkpoint, str(tmp_path), options
    pool.run(exports.exported, *arguments, exports.KINDS, timeout=300)
    pool.run(exports.exported_adapter, *arguments, timeout=300)
    golden = exports.golden(name)
    expected: dict = {kind: {"logits": golden[f"logits/{kind}"]} for kind in exports.KINDS}
    expected["peft"] = expected["lora"] | {"base": checkpoint}
    if layout == "tensor":
        hidden, _ = pool.run(exports.exported_otherwise, *arguments, timeout=240)
        expected |= {"function": expected["lora"], "backbone": {"outputs": hidden}}
    folders = [tmp_path / kind for kind in expected]
    for folder in folders:
        np.savez(folder / "expected.npz", tokens=golden["tokens"], **expected[folder.name])
    program = ROOT / "benchmarks" / "peers" / "transformers_exports.py"
    job = subprocess.run(
        [str(TRANSFORMERS), "-P", str(program), "check", *map(str, folders)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert job.returncode == 0, job.stderr[-3000:]
    lines = [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(folders)
    for line in lines:
        assert line["apart"] <= 1e-5, line


def test_verification_requires_transformers(one_process, tmp_path):
    checkpoint = exports.write_checkpoint("Llama3", tmp_path / "checkpoint")
    ((lacks, said),) = one_process.run(
        exports.unverified, checkpoint, str(tmp_path / "new"), timeout=240
    )
    assert lacks == ("Give `python` of an environment with them" in said)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_files_that_are_wrong_are_found(one_process, tmp_path, dtype):
    if not TRANSFORMERS.exists():
        pytest.skip("transformers is not installed: `make peers` makes its environment.")
    checkpoint = exports.write_checkpoint("Llama3", tmp_path / "checkpoint")
    ((right, wrong, none),) = one_process.run(
        exports.verified, checkpoint, str(tmp_path), str(TRANSFORMERS), dtype, timeout=240
    )
    assert right < (1e-5 if dtype == "float32" else 2e-3)
    assert "must compute the logits of the exported model" in wrong
    assert (
        "must be a folder of an exported model or adapter" in none
        and str(tmp_path / "none") in none
    )


BESIDE = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": '{"chat_template": "x"}',
    "chat_template.jinja": "{{ messages }}",
    "generation_config.json": '{"eos_token_id": [1, 2]}',
}


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("layout", slow_but(["tensor"], ["tensor", "zero", "pipeline"]))
def test_several_files_and_what_the_folder_had(pool, tmp_path, layout):
    checkpoint = Path(exports.write_checkpoint("Llama3", tmp_path / "checkpoint"))
    for name, text in BESIDE.items():
        (checkpoint / name).write_text(text)
    config = json.loads((checkpoint / "config.json").read_text()) | {"max_position_embeddings": 99}
    (checkpoint / "config.json").write_text(json.dumps(config))
    pool.run(
        exports.exported_shards,
        str(checkpoint),
        str(tmp_path),
        exports.LAYOUTS[layout],
        timeout=240,
    )
    whole = exports.tensors(str(tmp_path / "one"))
    several = tmp_path / "several"
    index = json.loads((several / "model.safetensors.index.json").read_text())
    assert not (several / "model.safetensors").exists()
    files = sorted(several.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    found = {}
    for file in files:
        from safetensors.numpy import load_file

        own = load_file(file)
        assert sum(value.nbytes for value in own.values()) <= 1500
        assert all(index["weight_map"][name] == file.name for name in own)
        found |= own
    assert set(found) == set(whole) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in whole.values())
    for name, value in whole.items():
        np.testing.assert_array_equal(found[name], value)
    for folder in (tmp_path / "one", several):
        for name, text in BESIDE.items():
            assert (folder / name).read_text() == text
        written = exports.config_of(str(folder))
        assert written["max_position_embeddings"] == 99
        assert written["architectures"] == config["architectures"]
        assert not list(folder.glob(".export-*"))


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("layout", slow_but(["tensor"], ["one", "tensor", "zero", "pipeline"]))
@pytest.mark.parametrize("name", slow_but(["Llama3", "GPT2"], exports.FAMILIES))
def test_adapters_of_peft_are_those_of_the_merged_model(pool, tmp_path, name, layout):
    checkpoint = exports.write_checkpoint(name, tmp_path / "checkpoint")
    options = exports.LAYOUTS[layout]
    pool.run(exports.exported_adapter, name, checkpoint, str(tmp_path), options, timeout=300)
    check_adapter(name, tmp_path, 1e-6)


def check_adapter(name: str, folder: Path, tolerance: float) -> None:
    """The base with the product of both matrices is what was merged."""
    from safetensors.numpy import load_file

    adapter = load_file(folder / "peft" / "adapter_model.safetensors")
    config = json.loads((folder / "peft" / "adapter_config.json").read_text())
    base = exports.golden(name)
    merged = exports.tensors(str(folder / "merged"))
    modules = {key.rpartition(".lora_")[0] for key in adapter}
    assert len(adapter) == 2 * len(modules)
    changed = set()
    for module in modules:
        weight = f"{module.removeprefix('base_model.model.')}.weight"
        down, up = (adapter[f"{module}.lora_{part}.weight"] for part in "AB")
        assert down.shape[0] == up.shape[1] == config["r"]
        change = config["lora_alpha"] / config["r"] * (up @ down)
        change = change.T if config["fan_in_fan_out"] else change
        right = base[f"weights/{weight}"].astype("float32") + change
        np.testing.assert_allclose(merged[weight], right, atol=tolerance, err_msg=weight)
        assert module.split(".")[-1] in config["target_modules"]
        changed.add(weight)
    for path, value in merged.items():
        if path not in changed and f"weights/{path}" in base:
            np.testing.assert_allclose(value, base[f"weights/{path}"], atol=tolerance)


def test_adapters_of_bfloat16(one_process, tmp_path):
    checkpoint = exports.write_checkpoint("Qwen", tmp_path / "checkpoint")
    one_process.run(
        exports.exported_adapter, "Qwen", checkpoint, str(tmp_path), {}, "bfloat16", timeout=240
    )
    from safetensors.numpy import load_file

    found = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert {str(value.dtype) for value in found.values()} == {"float32"}
    check_adapter("Qwen", tmp_path, 0.02)


def test_what_no_adapter_has_is_refused(one_process, tmp_path):
    checkpoint = exports.write_checkpoint("Qwen", tmp_path / "checkpoint")
    (said,) = one_process.run(exports.adapter_refused, checkpoint, str(tmp_path / "new"))
    assert "without any" in said[0] and "/bias`, which is trainable" in said[1]
    assert not (tmp_path / "new").exists()


def test_an_adapter_leaves_the_model_beside_it(tmp_path):
    from tfdist.addons.hub.exporting import new_folder, replace_files

    old = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "model.safetensors"]
    for name in old:
        (tmp_path / name).write_text("old")
    for name in ("adapter_model.safetensors", "model.safetensors"):
        with new_folder(tmp_path) as new:
            (new / name).write_text("new")
            replace_files(new, tmp_path)
        kept = {file.name for file in tmp_path.iterdir() if file.is_file()}
        assert (
            kept == {*old, "adapter_model.safetensors"}
            if name.startswith("adapter")
            else kept
            == {
                "model.safetensors",
                "adapter_model.safetensors",
            }
        )
