"""Memory and a plan's choices by hand: what is taken, from flags and files, and what is refused."""

import pytest

from mesp_mlx import sources
from mesp_mlx.errors import UserError


def load(**flags):
    return sources.load(None, {"model": "m", "data": "d"} | flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"memory": "2XB"}, "--memory: found '2XB', expected auto, least, fastest, a size as 2GB, 512MB or 1.5GiB, or a part of this machine's memory as 50%"),
        ({"memory": "0MB"}, "--memory: found '0MB', expected auto"),
        ({"memory": "101%"}, "--memory: found '101%', expected auto"),
        ({"adapters": "disk"}, "--adapters: found 'disk', expected 'memory' or 'file'"),
        ({"keep": "some"}, "--keep: found 'some', expected 'nothing', 'replay', 'inputs', 'attention' or 'all'"),
        ({"resident": "some"}, "--resident: found 'some', expected a whole number"),
        ({"resident": "-2"}, "--resident: found '-2', expected at least -1"),
        ({"group_tokens": 0}, "--group-tokens: found 0, expected at least 1"),
        ({"width_tile": 100}, "--width-tile: found 100, expected a multiple of 128, or 0"),
        ({"gradients": "applied"}, "gradients applied as they come can't be clipped, and grad_clip is 1: set grad_clip to 0, or gradients to held or spilled"),
        ({"method": "backprop", "adapters": "file"}, "strategy.adapter is file, which method backprop makes no use of: remove it, or take method mesp"),
        ({"method": "backprop", "resident": 2}, "strategy.resident is 2, which method backprop"),
        *(({"method": "mebp", **one}, f"strategy.{next(iter(one))} is") for one in ({"keep": "inputs"}, {"hold": False}, {"width_tile": 128})),
        ({"method": "mebp", "vocabulary_tile": 64}, "strategy.vocabulary_tile is 64, which method mebp makes no use of"),
        *(({"method": "mezo", **one}, f"strategy.{next(iter(one))} is") for one in ({"hold": True}, {"checkpoints": "file"}, {"gradients": "spilled"})),
        ({"dry_run": True, "try_step": True}, "both dry_run and try_step are given: keep one"),
    ],
)
def test_memory_and_choices_that_cannot_be_used(flags, message):
    with pytest.raises(UserError) as caught:
        load(**flags)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_choices_are_a_section_of_a_file_that_flags_override(tmp_path):
    file = tmp_path / "lora.yaml"
    file.write_text("model: m\ndata: d\nmemory: 50%\nstrategy: {checkpoints: file, adapter: file, resident: all}\n", encoding="utf-8")
    settings = sources.load(file, {"adapters": "memory", "hold": False})
    assert settings.memory == "50%" and settings.strategy.fixed == {"checkpoints": "file", "adapter": "memory", "resident": -1, "hold": False}
    file.write_text("model: m\ndata: d\nstrategy: {adapters: file}\n", encoding="utf-8")
    assert sources.load(file, {}).strategy.fixed == {"adapter": "file"}
    for text, message in (
        ("strategy: {adapters: disk}", f"strategy.adapter in {file}: found 'disk', expected 'memory' or 'file'"),
        ("strategy: {adapters: file, adapter: file}", f"both strategy.adapter in {file} and strategy.adapters are given"),
        ("memory: 0.2", f"memory in {file}: found 0.2, expected a size as 2GB"),
        ("memory: 2000", f"memory in {file}: found 2000, expected a size as 2GB"),
    ):
        file.write_text(f"model: m\ndata: d\n{text}\n", encoding="utf-8")
        with pytest.raises(UserError) as caught:
            sources.load(file, {})
        assert str(caught.value).startswith(message)
    assert load().strategy.fixed == {} and load().memory == "auto"
    assert load(gradients="applied", grad_clip=0).strategy.gradients == "applied"
    assert load(method="mebp", tiled_head=True, vocabulary_tile=64, adapters="file").strategy.vocabulary_tile == 64
    assert load(method="mezo", adapters="file", query_tile=16).strategy.adapter == "file"
    file.write_text("model: m\ndata: d\nstrategy: {checkpoints: disk}\ncheckpoints: file\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        sources.load(file, {})
    assert f"strategy.checkpoints in {file}: found 'disk'" in str(caught.value) and "write strategy.checkpoints" in str(caught.value)
