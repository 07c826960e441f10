"""The experiment with recipes: its workload, its bundle, and what verifies it."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors

from demo import progress
from experiments import checkpoint, profile
from experiments.profile import PROFILES, Profile, ProfileError
from experiments.tokendance import __main__ as command
from experiments.tokendance import codec, verify
from experiments.tokendance.workload import Prompt, Shape, Workload, check_unaligned, digest

ROOT = Path(__file__).resolve().parents[3]
SMALL = dataclasses.replace(
    PROFILES["tokendance-cpu"], layers=1, prompts=3, recompute_percent=(0, 15)
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run over the controlled workload leaves; the long ones are left out."""
    folder = tmp_path_factory.mktemp("bundle")
    codec.Run(SMALL, folder).run({"controlled": codec.controlled})
    return folder


# ---- the workload ---------------------------------------------------------------------------


def test_the_controlled_workload_is_the_one_described() -> None:
    workload = codec.controlled(PROFILES["tokendance-cpu"])
    assert [len(prompt.tokens) for prompt in workload.prompts] == [512] * 5
    (segment,) = workload.segments
    assert segment.description.tokens == 416
    assert len({prompt.starts for prompt in workload.prompts}) == 5
    for prompt in workload.prompts:
        (start,) = prompt.starts
        np.testing.assert_array_equal(
            prompt.tokens[start : start + 416], workload.segment_tokens[0]
        )
    shape = workload.shape
    assert 4 * 512 * shape.layers * 2 * shape.heads * shape.head_dim * 2 == 25_165_824


def test_a_seed_gives_the_same_again() -> None:
    first, again, other = (
        codec.controlled(dataclasses.replace(SMALL, seed=seed)) for seed in (1, 1, 2)
    )
    assert digest(first.prompts) == digest(again.prompts) != digest(other.prompts)
    for one, same in zip(first.siblings(15), again.siblings(15), strict=True):
        np.testing.assert_array_equal(one.state, same.state)
        assert one.description == same.description


def test_siblings_hold_what_their_provenance_says() -> None:
    workload = codec.controlled(SMALL)
    (segment,) = workload.segments
    for member in workload.siblings(15):
        (told,) = member.provenance
        part = member.state[:, 1, :, told.token : told.token + told.tokens]
        same = (part == segment.state[:, 1]).all(axis=(0, 1, 3))
        assert same.sum() == 416 - 416 * 15 // 100
        assert member.computed == 96 + 416 * 15 // 100
        assert told.delta == told.token - segment.description.position != 0


def test_shared_aligned_blocks_are_noticed() -> None:
    tokens = np.arange(64, dtype=np.uint32)
    check_unaligned([Prompt(tokens, (0,)), Prompt(tokens + 64, (0,))])
    other = np.concatenate([tokens[:32] + 100, tokens[16:48]])
    with pytest.raises(ValueError, match="prompts 0 and 1 share a block of 16"):
        check_unaligned([Prompt(tokens, (0,)), Prompt(other, (0,))])


def test_too_few_own_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        Workload(Shape(1, 1, 8, 100.0), [64], 20, 4, 1)


# ---- profiles ---------------------------------------------------------------------------------


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / ".config"
    profile.write(PROFILES["tokendance-cpu"], path)
    config, said = profile.read(path)
    assert config == PROFILES["tokendance-cpu"]
    assert isinstance(config, Profile)
    assert said["versions"]["numpy"] == np.__version__
    assert len(said["source"]["commit"]) == 40


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = 1\n", "missing or unknown"),
        ("seed = \n", "Invalid value"),
        (None, "make defconfig-tokendance-cpu"),
    ],
)
def test_a_profile_that_is_none(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / ".config"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ProfileError, match=message):
        profile.read(path)


def test_the_plan_says_that_no_state_is_reused_by_a_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / ".config"
    profile.write(PROFILES["tokendance-cpu"], path)
    said = profile.read(path)
    monkeypatch.setattr(profile, "read", lambda: said)
    assert command.main(["plan", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["executed_kv_reuse"] is False
    workload = planned["workloads"]["controlled"]
    assert workload["dense_bytes_of_siblings"] == 25_165_824
    assert len(workload["token_ids_sha256"]) == 64
    assert planned["profile"]["seed"] == PROFILES["tokendance-cpu"].seed


def test_a_checkpoint_is_chosen_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, model = tmp_path / ".config", tmp_path / "a model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    weights = model / "model.safetensors"
    weights.write_bytes(b"weights")
    monkeypatch.setattr(profile, "CONFIG", path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MODEL", str(model))
    assert command.main(["defconfig", "tokendance-model"]) == 0
    assert str(model) in capsys.readouterr().out
    config, said = profile.read(path)
    assert config.checkpoint == str(model)
    assert len(config.checkpoint_digest) == 64
    assert not said.keys() & {"layers", "kv_heads", "head_dim", "dtype", "rope_theta"}
    # As in another shell.
    monkeypatch.delenv("MODEL")
    assert checkpoint.path_of(config) == str(model)
    monkeypatch.setenv("MODEL", str(tmp_path))
    with pytest.raises(ProfileError, match="MODEL another checkpoint"):
        checkpoint.path_of(config)
    monkeypatch.delenv("MODEL")
    weights.write_bytes(b"weights of another")
    with pytest.raises(ProfileError, match="not what it was when it was chosen"):
        checkpoint.path_of(config)


def test_a_model_that_is_none_is_not_chosen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / ".config"
    monkeypatch.setattr(profile, "CONFIG", path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for given, said in ((tmp_path / "none", "is no directory"), (tmp_path, "no checkpoint's")):
        monkeypatch.setenv("MODEL", str(given))
        assert command.main(["defconfig", "tokendance-model"]) == 2
        assert said in capsys.readouterr().err
    assert not path.exists()


# ---- the bundle ---------------------------------------------------------------------------------


def test_the_bundle_verifies(bundle: Path) -> None:
    counts = verify.verify(bundle)
    assert counts["golden_vectors"] == 2
    assert counts["members"] == 1 + 2 * 2 + 2
    assert counts["refused"] >= 17


def test_a_run_says_on_standard_error_what_it_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = dataclasses.replace(SMALL, prompts=2, bundle=str(tmp_path))
    monkeypatch.setattr(profile, "read", lambda: (config, {}))
    monkeypatch.setitem(codec.WORKLOADS, config.model, {"controlled": codec.controlled})
    # Also on a slow machine nothing is said again.
    monkeypatch.setattr(progress, "AGAIN", 3600.0)
    assert command.main(["codec", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["arms"].keys() == {
        *("recompute-0", "recompute-15", "primer", "by-content")
    }
    parts = ["prompts and state", "base", "recompute-0", "recompute-15", "primer", "by-content"]
    lines = [
        line
        for part in parts
        for line in (rf"· controlled: {part} …", rf"✓ controlled: {part} [\d.]+ s")
    ]
    assert re.fullmatch("".join(rf" *\d+ s {line}\n" for line in lines), told.err), told.err


def test_sizes_in_codec_json_are_those_of_the_files(bundle: Path) -> None:
    result = json.loads((bundle / "codec.json").read_text())
    stored = verify.tensors(bundle / "recipes-recompute-0.safetensors")
    for name, row in result["arms"]["recompute-0"]["members"].items():
        assert row["dense_bytes"] == row["dense_k_bytes"] + row["dense_v_bytes"]
        for form in ("addressable", "cold"):
            sizes = row[form]
            assert sizes["bytes"] == len(stored[f"{form}/{name}"])
            assert sizes["bytes"] == sizes["k_bytes"] + sizes["v_bytes"] + sizes["table_bytes"]
        # Own tokens alone are written out, K and V alike.
        assert row["addressable"]["k_bytes"] == 96 * 256 == row["addressable"]["v_bytes"]


def test_tensors_are_what_others_read(bundle: Path) -> None:
    path = bundle / "members-recompute-0.safetensors"
    ours = verify.tensors(path)
    with safetensors.safe_open(path, framework="pt") as theirs:
        assert set(theirs.keys()) == set(ours)
        for name, payload in ours.items():
            tensor = theirs.get_tensor(name)
            assert str(tensor.dtype) == "torch.bfloat16"
            assert tensor.shape == (1, 2, 2, 512, 64)
            assert tensor.view(dtype=_uint8()).numpy().tobytes() == payload


def _uint8() -> object:
    import torch

    return torch.uint8


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("members-recompute-0.safetensors", "other bytes than the manifest"),
        ("recipes-recompute-0.safetensors", "other bytes than the manifest"),
        ("base-controlled.safetensors", "other bytes than the manifest"),
        ("codec.json", "other bytes than the manifest"),
    ],
)
def test_a_bundle_that_was_changed(
    bundle: Path, tmp_path: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(bundle, folder)
    data = bytearray((folder / name).read_bytes())
    data[-100] ^= 1
    (folder / name).write_bytes(data)
    assert verify.main([str(folder)]) == 1
    assert message in capsys.readouterr().err


def test_a_member_that_is_another_is_noticed_under_new_hashes(bundle: Path, tmp_path: Path) -> None:
    """The manifest is made anew, so that only the comparison of bits can tell."""
    folder = tmp_path / "changed"
    shutil.copytree(bundle, folder)
    path = folder / "members-recompute-15.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"][path.name] = verify.hashlib.sha256(data).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(verify.VerifyError, match="other bytes came out"):
        verify.verify(folder)


def test_every_change_is_refused_and_named(bundle: Path) -> None:
    result = json.loads((bundle / "codec.json").read_text())
    base = verify.verify_bases(bundle, result)["controlled"]
    file = verify.tensors(bundle / "recipes-recompute-0.safetensors")["addressable/member-1"]
    names = [what for what, _, _ in verify.changes(file, base)]
    for word in ("flipped", "cut", "master", "distance", "planes", "generation", "kernel"):
        assert any(word in name for name in names), word


def test_a_change_that_is_not_refused_fails(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a decoder that takes everything, the check of refusals says so."""
    result = json.loads((bundle / "codec.json").read_text())
    base = verify.verify_bases(bundle, result)["controlled"]
    monkeypatch.setattr(verify, "decode", lambda *_: None)
    with pytest.raises(verify.VerifyError, match="was not refused"):
        verify.verify_refusals(bundle, "recompute-0", base)


def test_no_bundle_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main([str(tmp_path)]) == 2
    assert "make tokendance-codec" in capsys.readouterr().err


def test_the_second_decoder_imports_nothing_of_kmesh() -> None:
    program = (
        "import sys, experiments.tokendance.verify;"
        "print(*(name for name in sys.modules if name.partition('.')[0] == 'kmesh'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
