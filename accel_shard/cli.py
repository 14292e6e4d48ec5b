"""The command ``accel-shard``: write accelerate configs, explain policies, check existing configs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from accel_shard.errors import PolicyError, SnapshotError

__all__ = ["main"]

_POLICY_HELP = "a preset (fsdp2), a policy file, or one line (fsdp2,precision=bf16)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code: 0 fine, 1 findings, 2 wrong use."""
    args = _parser().parse_args(arguments)
    try:
        return int(args.run(args))
    except (PolicyError, SnapshotError, ValueError) as error:
        print(f"accel-shard: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"accel-shard: cannot write or read {error.filename!r}: {error.strerror}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    from accel_shard import __version__

    parser = argparse.ArgumentParser(
        prog="accel-shard", description="One sharding policy for Accelerate: DDP, FSDP and DeepSpeed ZeRO."
    )
    parser.add_argument("--version", action="version", version=f"accel_shard {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    config = commands.add_parser("config", help="write an accelerate config that says a policy")
    config.add_argument("policy", nargs="?", help=_POLICY_HELP)
    config.add_argument("-o", "--output", help="file to write (default: print it); a folder with --all")
    config.add_argument("--all", action="store_true", help="write every shipped config into the folder --output")
    config.set_defaults(run=_config)

    explain = commands.add_parser("explain", help="what a policy or an accelerate config really does, per field")
    explain.add_argument("source", nargs="?", help=f"{_POLICY_HELP}, or an accelerate config file")
    explain.add_argument("--matrix", action="store_true", help="print which backend honours which field, as Markdown")
    explain.set_defaults(run=_explain)

    check = commands.add_parser("check", help="find unknown, dead and contradicting keys in a config")
    check.add_argument("files", nargs="+", metavar="FILE", help="accelerate YAML or JSON, or a DeepSpeed JSON")
    check.add_argument("--strict", action="store_true", help="warnings count as findings for the exit code too")
    check.set_defaults(run=_check)

    checkpoints = commands.add_parser("checkpoints", help="list, check, compare, prune and export snapshots of a run")
    actions = checkpoints.add_subparsers(required=True, metavar="ACTION")
    for name, text in (
        ("ls", "list the snapshots in a folder, the last committed first"),
        ("show", "list a snapshot's tensors and files"),
        ("verify", "check every byte of a snapshot"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("path")
        action.set_defaults(run=_checkpoints, action=name)
    diff = actions.add_parser("diff", help="list the tensors that two snapshots do not have alike")
    diff.add_argument("path")
    diff.add_argument("other")
    diff.set_defaults(run=_checkpoints, action="diff")
    prune = actions.add_parser("prune", help="remove all but the newest and the pinned snapshots")
    prune.add_argument("path")
    prune.add_argument("--keep", type=int, required=True, help="how many of the newest stay")
    prune.set_defaults(run=_checkpoints, action="prune")
    export = actions.add_parser("export", help="write a snapshot's weights as a folder for from_pretrained")
    export.add_argument("path")
    export.add_argument("target")
    export.add_argument("--like", required=True, help="a folder of the same model: its config and tokenizer are used")
    export.add_argument("--dtype", default="fp32", help="fp32, bf16 or fp16 (default: fp32)")
    export.add_argument("--max-shard-size", default="5GB", help="of one file (default: 5GB)")
    export.set_defaults(run=_checkpoints, action="export")
    return parser


def _config(args: argparse.Namespace) -> int:
    from accel_shard.launch_config import write_config
    from accel_shard.policy import PRESETS, ShardingPolicy

    if args.all:
        if args.policy or not args.output:
            raise PolicyError("config --all takes no policy and needs --output FOLDER.")
        return _config_all(Path(args.output))
    if not args.policy:
        raise PolicyError(f"config needs a policy: one of {', '.join(PRESETS)}, a policy file, or --all.")
    from accel_shard.launch_config import SHIPPED, shipped_configs

    shipped = args.policy in SHIPPED and args.policy not in PRESETS
    comment = SHIPPED.get(args.policy, "")
    text = (
        shipped_configs()[args.policy] if shipped else write_config(ShardingPolicy.load(args.policy), comment=comment)
    )
    if args.output:
        Path(args.output).write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


def _config_all(folder: Path) -> int:
    from accel_shard.launch_config import shipped_configs

    folder.mkdir(parents=True, exist_ok=True)
    for name, text in shipped_configs().items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
        print(folder / f"{name}.yaml")
    return 0


def _explain(args: argparse.Namespace) -> int:
    if args.matrix:
        from accel_shard.support import matrix

        print(matrix(), end="")
        return 0
    if not args.source:
        raise PolicyError("explain needs a policy or a config file, or --matrix.")
    from accel_shard.explain import explain_file_or_name, explain_versions

    print(explain_file_or_name(args.source) + "\n" + explain_versions(), end="")
    return 0


def _check(args: argparse.Namespace) -> int:
    from accel_shard.check import check_file

    failed = False
    for file in args.files:
        findings = check_file(file)
        for finding in findings:
            print(f"{file}: {finding.level}: {finding.key}: {finding.message}")
        failed |= any(f.level == "error" or args.strict for f in findings)
        if not findings:
            print(f"{file}: nothing unknown, dead or contradicting")
    return int(failed)


def _checkpoints(args: argparse.Namespace) -> int:
    from accel_shard.checkpoint import offline

    if args.action == "verify":
        offline.verify(args.path)
        print(f"{args.path}: every byte is as it was written")
        return 0
    if args.action == "export":
        options = {"dtype": args.dtype, "max_size": args.max_shard_size}
        print(offline.export(args.path, args.target, args.like, **options))
        return 0
    if args.action == "diff":
        lines = list(offline.differences(args.path, args.other))
        print("\n".join(lines) or "no tensor differs")
        return int(bool(lines))
    if args.action == "prune":
        lines = [f"removed {path}" for path in offline.prune(args.path, args.keep)]
    else:
        lines = {"ls": offline.rows, "show": offline.shown}[args.action](args.path)
    print("\n".join(lines))
    return 0
