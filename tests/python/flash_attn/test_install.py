"""install_shims: programs that import flash_attn have the drop-in as long as it is installed, and no longer."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys

import pytest

torch = pytest.importorskip("torch")

import flashport  # noqa: E402
import flashport.flash_attn as ours  # noqa: E402
from flashport.flash_attn import bert_padding, flash_attn_2_cuda, flash_attn_interface  # noqa: E402


@pytest.fixture
def real(tmp_path, monkeypatch):
    """A package flash_attn of another version on the path, with a module that the drop-in lacks."""
    package = tmp_path / "flash_attn"
    for folder in (package, package / "cute", package / "layers"):
        folder.mkdir()
    (package / "__init__.py").write_text('__version__ = "1.0"\n')
    (package / "bert_padding.py").write_text("is_real = True\n")
    (package / "losses.py").write_text("is_real = True\n")
    (package / "cute" / "__init__.py").write_text("from flash_attn.cute.inner import name\n")
    (package / "cute" / "inner.py").write_text('name = "cute"\n')
    (package / "layers" / "__init__.py").write_text("")
    (package / "layers" / "mlp.py").write_text("is_real = True\n")
    info = tmp_path / "flash_attn-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]


def expect_gone():
    assert importlib.util.find_spec("flash_attn") is None
    assert importlib.util.find_spec("flash_attn_2_cuda") is None
    assert not [name for name in sys.modules if name.partition(".")[0] in ("flash_attn", "flash_attn_2_cuda")]
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")


def test_not_by_default():
    expect_gone()


def test_modules():
    with flashport.install_shims("flash_attn"):
        import flash_attn
        import flash_attn.bert_padding
        import flash_attn_2_cuda as extension
        from flash_attn.flash_attn_interface import _flash_attn_forward, _get_block_size_n
        from flash_attn.layers.rotary import apply_rotary_emb

        assert flash_attn.flash_attn_func is ours.flash_attn_func
        assert flash_attn.__version__ == ours.__version__ == "2.8.4"
        assert flash_attn.__all__ == ours.__all__
        assert flash_attn.bert_padding is bert_padding
        assert extension is flash_attn_2_cuda
        assert _flash_attn_forward is flash_attn_interface._flash_attn_forward
        assert _get_block_size_n is flash_attn_interface._get_block_size_n
        assert apply_rotary_emb is importlib.import_module("flashport.flash_attn.layers.rotary").apply_rotary_emb
        assert flash_attn.__spec__.name == flash_attn.__name__ == "flash_attn"
        assert bert_padding.__spec__.name == bert_padding.__name__ == "flashport.flash_attn.bert_padding"
        assert importlib.util.find_spec("flash_attn.layers.rotary") is not None
        for name in ("cute", "_checks", "flash_attn_2_cuda", "layers.mlp", "nothing.below"):
            with pytest.raises(ImportError):
                importlib.import_module(f"flash_attn.{name}")
    expect_gone()


def test_the_interface_is_an_attribute_as_soon_as_the_package_is_imported():
    with flashport.install_shims():
        import flash_attn

        assert flash_attn.flash_attn_interface is flash_attn_interface
        assert sys.modules["flash_attn.flash_attn_interface"] is flash_attn_interface
        assert not hasattr(flash_attn, "bert_padding")  # which flash-attn does not import itself
    expect_gone()


def test_submodules_are_attributes():
    with flashport.install_shims():
        import flash_attn.bert_padding
        import flash_attn.layers.rotary

        assert flash_attn.bert_padding is bert_padding
        assert flash_attn.layers.rotary is importlib.import_module("flashport.flash_attn.layers.rotary")
        assert flash_attn.layers.__name__ == "flash_attn.layers"
    expect_gone()


@pytest.mark.parametrize("name", ["flash_attn", "flash-attn", "Flash_Attn"])
def test_metadata(name):
    with flashport.install_shims():
        assert importlib.metadata.version(name) == "2.8.4"
        assert importlib.metadata.metadata(name)["Name"] == "flash_attn"
        assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash_attn"]
        assert importlib.metadata.version("numpy")
    expect_gone()


def test_undo_is_done_once_for_each_installation():
    first, second = flashport.install_shims(), flashport.install_shims("flash_attn")
    first.undo()
    first.undo()
    assert importlib.import_module("flash_attn").flash_attn_func is ours.flash_attn_func
    second.undo()
    expect_gone()


def test_undone_after_an_exception():
    def fails():
        with flashport.install_shims():
            importlib.import_module("flash_attn")
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    expect_gone()


@pytest.mark.usefixtures("real")
class TestBesideARealOne:
    def test_other_modules_come_from_there(self):
        with flashport.install_shims():
            import flash_attn.cute
            import flash_attn.layers.mlp
            from flash_attn import losses
            from flash_attn.layers.rotary import apply_rotary_emb

            assert flash_attn.cute.name == "cute"
            assert losses.is_real
            assert flash_attn.layers.mlp.is_real
            assert apply_rotary_emb.__module__ == "flashport.flash_attn.layers.rotary"
            assert importlib.import_module("flash_attn.bert_padding") is bert_padding
            assert importlib.metadata.version("flash_attn") == "2.8.4"
        assert importlib.metadata.version("flash_attn") == "1.0"

    def test_one_that_is_loaded_is_put_aside(self):
        before = importlib.import_module("flash_attn")
        padding = importlib.import_module("flash_attn.bert_padding")
        cute = importlib.import_module("flash_attn.cute")
        with flashport.install_shims():
            import flash_attn

            assert flash_attn is not before
            assert flash_attn.__version__ == "2.8.4"
            assert flash_attn.cute is cute
            assert flash_attn.flash_attn_interface is flash_attn_interface
            assert importlib.import_module("flash_attn.bert_padding") is bert_padding
        assert importlib.import_module("flash_attn") is before
        assert importlib.import_module("flash_attn.bert_padding") is padding
        assert before.__version__ == "1.0"


def test_wrong_names():
    with pytest.raises(ValueError, match=r'^install_shims: name must be "flash_attn", got "flash_attn_3"'):
        flashport.install_shims("flash_attn_3")
    with pytest.raises(TypeError, match=r"^install_shims: name must be a str, got NoneType$"):
        flashport.install_shims(None)
    expect_gone()
