"""The plugin is off without settings, in any version of vLLM; stand-ins of vLLM's modules, without PyTorch."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from samples import refused

import sketchssm.vllm

REGISTRY = {}


class PluggableLayer:
    """As in vLLM 0.26 to 0.33: the registry names the class of an object that is made."""

    def __new__(cls, *args):
        return super().__new__(REGISTRY.get(cls.__name__, cls))


class KimiGatedDeltaNetAttention(PluggableLayer):
    get_state_shape = None

    def _forward(self, one_argument_as_in_later_versions):
        return one_argument_as_in_later_versions


class RMSNorm(PluggableLayer):
    pass


@pytest.fixture
def vllm(monkeypatch):
    """A function that stands in a version of vLLM, whose engine has an `additional_config`, and calls the plugin."""
    monkeypatch.delenv("SKETCHSSM_VLLM", raising=False)
    monkeypatch.setattr(sys.modules[__name__], "REGISTRY", {})
    own = PluggableLayer.__new__
    monkeypatch.setattr(PluggableLayer, "__new__", own)

    def stand_in(version, additional=None, **names):
        config = SimpleNamespace(additional_config=additional) if additional is not None else None
        modules = {
            "vllm": {"__version__": version},
            "vllm.config": {"get_current_vllm_config_or_none": lambda: config},
            "vllm.model_executor": {},
            "vllm.model_executor.custom_op": {"PluggableLayer": PluggableLayer},
        }
        for name, attributes in (modules | names).items():
            module = ModuleType(name)
            vars(module).update(attributes)
            monkeypatch.setitem(sys.modules, name, module)
        sketchssm.vllm.register()
        sketchssm.vllm.register()

    return stand_in


@pytest.mark.parametrize("additional", [None, {}, {"other": 1}])
@pytest.mark.parametrize("version", ["0.26.0", "0.27.1", "0.33.0"])
def test_without_settings(vllm, version, additional):
    """Layers are vLLM's own."""
    vllm(version, additional)
    layer = KimiGatedDeltaNetAttention(1, 2)
    assert type(layer) is KimiGatedDeltaNetAttention
    assert layer._forward(3) == 3
    assert not REGISTRY


def test_a_version_without_such_layers(vllm, monkeypatch):
    vllm("0.40.0", **{"vllm.model_executor.custom_op": {}})
    monkeypatch.setenv("SKETCHSSM_VLLM", "replay")
    refused("vllm: expected a version with layers that can", vllm, "0.40.0", **{"vllm.model_executor.custom_op": {}})


def test_wrong_settings_are_refused_before_an_engine(vllm, monkeypatch):
    monkeypatch.setenv("SKETCHSSM_VLLM", '{"plan": "replay"}')
    refused("sketchssm: expected fields among plans, .*, got 'plan'", vllm, "0.33.0")


@pytest.mark.parametrize("variable", [True, False])
def test_with_settings(vllm, monkeypatch, variable):
    """The layers are registered once the engine is known, before the first recurrent one is made."""
    if variable:
        monkeypatch.setenv("SKETCHSSM_VLLM", "replay")

    class Head(KimiGatedDeltaNetAttention):
        pass

    plugin = ModuleType("sketchssm.vllm.plugin")
    plugin.take = lambda cls: REGISTRY.update({cls.__name__: Head})
    monkeypatch.setitem(sys.modules, "sketchssm.vllm.plugin", plugin)
    vllm("0.33.0", {} if variable else {"sketchssm": "replay"})
    RMSNorm()
    assert not REGISTRY
    assert type(KimiGatedDeltaNetAttention()) is Head
