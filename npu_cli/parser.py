"""The whole command line, in one place. Imports nothing of the project, so that `npu --help` is quick."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["build_parser"]

_SEEDS = 1 << 64  # as many as generators of random numbers take
_DEVICE_HELP = "as `npu doctor` names it, with an index such as :1; the best of this machine when omitted"
_TARGET_HELP = "what to compile for; default: what `npu_compiler.compile` does"
_DEBUG_HELP = "show the traceback of an error"
_MODEL_HELP = "the GPU to choose kernels for, by the name the target knows it by; the target's default when omitted"


def build_parser() -> argparse.ArgumentParser:
    """The parser of `npu`.

    Its result names the command in `command`, None where none was given; the other fields are that command's own.
    """
    parser = argparse.ArgumentParser(prog="npu", description="Compiles PyTorch models ahead of time and runs them.")
    parser.add_argument("--debug", action="store_true", help=_DEBUG_HELP)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_compile(commands.add_parser("compile", help="compile IR to a program"))
    _add_describe(commands.add_parser("describe", help="print everything a program holds"))
    _add_partition(commands.add_parser("partition", help="show what runs on the device, what on the CPU, and why"))
    _add_run(commands.add_parser("run", help="run a program, or IR, on images or arrays"))
    _add_tune(commands.add_parser("tune", help="time what the compiler left to choose, and keep the winners"))
    _add_extract_llm(commands.add_parser("extract-llm", help="take a language model of Hugging Face to IR"))
    _add_quantize(commands.add_parser("quantize", help="take a language model to weights of few bits"))
    _add_generate(commands.add_parser("generate", help="generate text with a language model"))
    _add_serve(commands.add_parser("serve", help="serve a model to clients of the OpenAI API"))
    _add_chat(commands.add_parser("chat", help="talk with a language model on the terminal"))
    _add_demo(commands.add_parser("demo", help="take a ResNet from PyTorch to a device and compare"))
    doctor = commands.add_parser("doctor", help="show what this machine offers, and what would add the rest")
    doctor.add_argument(
        "--repair", action="store_true", help="drop damaged and refused kernels from the cache, try anew"
    )
    for command in commands.choices.values():  # behind the command too, where one adds it to a line that failed
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=_DEBUG_HELP)
    return parser


def _add_compile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ir", type=_path, metavar="IR.json", help="what npu_compiler.extract wrote")
    parser.add_argument("-o", "--output", type=_path, metavar="M.npubin", help="default: beside the IR")
    parser.add_argument("--target", help=_TARGET_HELP)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), help="default: chosen by the weights")
    parser.add_argument("--device", help=_MODEL_HELP)


def _add_describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("program", type=_path, metavar="M.npubin")


def _add_partition(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ir", type=_path, metavar="IR.json", help="what npu_compiler.extract wrote")
    parser.add_argument("--target", help=_TARGET_HELP)
    parser.add_argument("--device", help=_MODEL_HELP)
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=_path, metavar="MODEL", help="M.npubin, or IR.json, which is compiled first")
    parser.add_argument("--weights", type=_path, metavar="W.safetensors", help="needed where the program has weights")
    parser.add_argument(
        *("-i", "--input"),
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="an .npy array, or an image: scaled to cover the input with a margin (256 for 224), cropped at the "
        "centre, normalised by ImageNet's mean and deviation; repeat it for each input",
    )
    parser.add_argument("-o", "--output", type=_path, metavar="DIR", help="write each output there as NAME.npy")
    parser.add_argument("--partition", action="store_true", help="of IR, run on the CPU what the device cannot")
    parser.add_argument("--ledger", action="store_true", help="then measure what the CPU costs, and print why it is")
    parser.add_argument("--device", help=_DEVICE_HELP)
    parser.add_argument("--top", type=_positive, default=5, metavar="N", help="how many of the highest values to print")
    parser.add_argument("--tune", action="store_true", help="first time what the compiler left to choose")


def _add_tune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("program", type=_path, metavar="M.npubin", help="what npu compile made")
    parser.add_argument("--weights", type=_path, metavar="W.safetensors", help="default: random ones")
    parser.add_argument("--device", help=_DEVICE_HELP)


def _add_extract_llm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", type=_path, metavar="MODEL", help="a Hugging Face folder, a .gguf file, or a config.json alone"
    )
    parser.add_argument("-o", "--output", type=_path, required=True, metavar="DIR", help="where to write the model")
    parser.add_argument("--cache", type=_positive, metavar="N", help="the most tokens of a text; default: 2048")
    parser.add_argument(
        "--prefill", type=_numbers, metavar="N,N", help="lengths of prompts that get a function; default: 128,512"
    )
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), help="default: the checkpoint's, else bfloat16")
    parser.add_argument("--seed", type=_seed, default=0, help="of the weights, where there are none; default: 0")
    parser.add_argument(
        "--lanes", type=_numbers, metavar="N,N", help="many texts at once: so many for each decode step; default: none"
    )
    parser.add_argument("--page-tokens", type=_positive, default=128, metavar="N", help="of a page; default: 128")
    parser.add_argument(
        "--pages", type=_positive, metavar="N", help="pages for all texts together; default: enough for full lanes"
    )
    parser.add_argument(
        "--chunks", type=_numbers, metavar="N,N", help="tokens of a prompt taken at once; default: 128,512,2048"
    )
    parser.add_argument(
        "--guess", type=_positive, default=1, metavar="K", help="check so many tokens at once; default: 1"
    )
    parser.add_argument(
        "--activations",
        choices=("fp8", "int8", "16"),
        help="what linears multiply 8-bit weights of that type by; default: what the checkpoint says, else 16 bits",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("int8", "fp8", "16"),
        help="what the cache holds keys and values in, with a scale for each head and token; default: 16 bits",
    )


def _add_quantize(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=_path, metavar="DIR", help="a Hugging Face folder with weights in half precision")
    parser.add_argument(
        "-o", "--output", type=_path, required=True, metavar="DIR", help="where to write the checkpoint"
    )
    parser.add_argument("--weights", choices=("int8", "int4", "fp8", "nf4"), required=True, help="what linears become")
    parser.add_argument(
        "--group", choices=("32", "64", "128", "row"), default="row", help="inputs that share a scale; default: row"
    )
    parser.add_argument(
        "--head", choices=("int8", "16"), help="what output layer and embedding become; default: int8, of nf4 16 bits"
    )
    parser.add_argument(
        "--method",
        choices=("rtn", "search"),
        default="rtn",
        help="rtn: to the nearest, in the best range; search: with scales that weigh the inputs seen on a text",
    )
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--calibrate", type=_path, metavar="FILE", help="a text by which layers and logits are judged")
    text.add_argument("--ids", type=_numbers, metavar="N,N", help="the text as token ids, for want of a tokenizer")


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=_path, metavar="DIR", help="what npu extract-llm made")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", type=_text, metavar="TEXT", help="what to continue")
    prompt.add_argument("--ids", type=_numbers, metavar="N,N", help="the prompt as token ids, for want of a tokenizer")
    parser.add_argument("--max-tokens", type=_positive, metavar="N", help="default: as many as the cache holds")
    parser.add_argument("--temperature", type=_number, default=0.0, help="default: 0, which takes the likeliest token")
    parser.add_argument("--top-k", type=_whole, metavar="N", help="choose among the N likeliest tokens")
    parser.add_argument("--top-p", type=_number, metavar="P", help="choose among the likeliest tokens that make up P")
    parser.add_argument("--seed", type=_seed, help="makes the choices repeatable")
    parser.add_argument("--device", help=_DEVICE_HELP)
    parser.add_argument("--partition", action="store_true", help="run on the CPU what the device cannot")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=_path, metavar="DIR", help="what npu extract-llm --lanes made, or an encoder")
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, which this machine alone reaches")
    parser.add_argument("--port", type=_whole, default=8000, metavar="N", help="default: 8000; 0 for any")
    parser.add_argument("--name", help="by which clients ask for the model; default: the folder's name")
    parser.add_argument(
        "--api-key",
        type=_key,
        action="append",
        default=[],
        metavar="KEY",
        help="refuse who has none of these; repeat it for each",
    )
    parser.add_argument("--queue", type=_positive, default=1024, metavar="N", help="texts that may wait; default: 1024")
    parser.add_argument(
        "--patience", type=_amount, default=60.0, metavar="SECONDS", help="for which one may wait; default: 60"
    )
    parser.add_argument(
        "--chunk", type=_positive, metavar="N", help="tokens of prompts between two steps; default: as a function takes"
    )
    parser.add_argument(
        "--max-body", type=_positive, default=4 << 20, metavar="BYTES", help="of a request; default: 4 MiB"
    )
    parser.add_argument(
        "--temperature", type=_amount, default=1.0, help="where a request names none; default: 1, as the API has it"
    )
    parser.add_argument("--device", help=f"{_DEVICE_HELP}; a process on each of several, with commas between them")


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=_path, metavar="DIR", help="what npu extract-llm made")
    parser.add_argument("--system", type=_text, metavar="TEXT", help="what the model is told first")
    parser.add_argument("--max-tokens", type=_positive, metavar="N", help="of an answer; default: what the cache holds")
    parser.add_argument("--temperature", type=_number, default=0.7, help="default: 0.7; 0 takes the likeliest token")
    parser.add_argument("--top-k", type=_whole, metavar="N", help="choose among the N likeliest tokens")
    parser.add_argument("--top-p", type=_number, metavar="P", help="choose among the likeliest tokens that make up P")
    parser.add_argument("--seed", type=_seed, help="makes the choices repeatable")
    parser.add_argument("--device", help=_DEVICE_HELP)


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="resnet18", choices=("resnet18", "resnet50"), help="default: resnet18")
    parser.add_argument(
        "--weights",
        default="auto",
        choices=("auto", "pretrained", "seeded"),
        help="default: auto, which takes seeded weights where pretrained ones cannot be fetched",
    )
    parser.add_argument("--image", type=_path, metavar="FILE", help="a photograph; default: a cat")
    parser.add_argument("--device", help=_DEVICE_HELP)
    parser.add_argument("-o", "--output", type=_path, default=Path("demo"), metavar="DIR", help="default: demo")


class _Version(argparse.Action):
    """Prints the version; the package that knows it is imported only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from npu_compiler import __version__

        print(f"npu {__version__}")
        parser.exit()


def _path(text: str) -> Path:
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"given {text!r}, expected a path")
    return Path(text)


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes that Python could not decode
        raise argparse.ArgumentTypeError(f"given {text!r}, expected text in UTF-8") from None
    return text


def _key(text: str) -> str:
    if not text:  # as from a variable that is not set; anybody would have it
        raise argparse.ArgumentTypeError("given '', expected a key")
    return _text(text)


def _numbers(text: str) -> list[int]:
    try:
        return [_whole(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        message = f"given '{text:.80}', expected whole numbers with commas between them, such as 5,6,7"
        raise argparse.ArgumentTypeError(message) from None


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"given '{text:.80}', expected a whole number") from None


def _positive(text: str) -> int:
    value = _whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"given {value}, expected a number above 0")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"given '{text:.80}', expected a number") from None


def _amount(text: str) -> float:
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"given {value}, expected a number from 0 on")
    return value


def _seed(text: str) -> int:
    value = _whole(text)
    if not 0 <= value < _SEEDS:
        raise argparse.ArgumentTypeError(f"given {value}, expected 0 to {_SEEDS - 1}")
    return value
