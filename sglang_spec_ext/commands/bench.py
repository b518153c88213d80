"""`spec-ext bench`: one table of benchmarks, each imported only when it is called."""

import argparse
import importlib

# name -> (module with configure(parser) and run(args) -> int, one line of help)
BENCHMARKS = {
    "envelope": (
        "sglang_spec_ext.commands.bench_envelope",
        "the controller against every fixed K and stock SGLang, at every load, on real servers",
    ),
    "kernels": (
        "sglang_spec_ext.commands.bench_kernels",
        "our kernels, their torch twins, torch.compile and SGLang's own, checked and timed",
    ),
    "overhead": (
        "sglang_spec_ext.commands.bench_overhead",
        "what the extension costs a step whose width it does not change, against stock SGLang",
    ),
    "platform": (
        "sglang_spec_ext.commands.bench_platform",
        "a decode step of the CPU platform against transformers, and the price of verifying eight tokens",
    ),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the sub-subcommands."""
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, (module, summary) in BENCHMARKS.items():
        importlib.import_module(module).configure(
            benchmarks.add_parser(name, help=summary, description=summary)
        )


def run(args: argparse.Namespace) -> int:
    """Carry out the benchmark."""
    return int(importlib.import_module(BENCHMARKS[args.benchmark][0]).run(args))
