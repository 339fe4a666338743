"""What the README shows is true of this tree."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_equals_plain_autodiff(capsys):
    pytest.importorskip("mlx.core")
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(example, {})
    errors = [float(line) for line in capsys.readouterr().out.split()]
    assert len(errors) == 2 and all(error <= 1e-5 for error in errors)


def test_the_tree_names_every_module():
    tree = README[README.index("mesp_mlx/\n") :]
    missing = [file.name for file in (ROOT / "mesp_mlx").rglob("*.py") if file.name != "__init__.py" and not re.search(rf"\b{file.stem}\b", tree)]
    missing += [file.name for file in (ROOT / "tools").iterdir() if file.is_file() and file.stem not in tree]
    assert missing == []
