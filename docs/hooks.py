"""Add to the pages of `make docs`: the help of every command, pictures, and links to files of the repository.

A page may link to a file outside docs/, as it is read on GitHub too. On the site such a link leads to $REPOSITORY_URL,
or where that is not set it is text. A file that is not there ends the build.
"""
import os
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

REPO = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)#]+)(#[^)]*)?\)")
COMMANDS = ("open_clip_mdc", "open_clip_train", "clip_benchmark eval")


def on_files(files, config):
    files.append(File.generated(config, "commands.md", content=commands()))
    for picture in (REPO / "experiments" / "figures").glob("*.png"):
        files.append(File.generated(config, f"figures/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown, page, **_):
    def moved(match: re.Match) -> str:
        picture, text, path, anchor = match.group(1, 2, 3, 4)
        if not (REPO / path).exists():
            raise PluginError(f"{page.file.src_uri} links to {path}, which is not there")
        if picture:
            return f"![{text}](figures/{Path(path).name})"
        address = os.environ.get("REPOSITORY_URL")
        return f"[{text}]({address}/blob/main/{path}{anchor or ''})" if address else f"{text} (`{path}`)"
    return LINK.sub(moved, markdown)


def help_of(*words: str) -> str:
    script = Path(sys.executable).with_name(words[0])  # the help names the command as it was called
    return subprocess.run([script, *words[1:], "--help"], check=True, text=True, cwd=REPO,
                          capture_output=True, env={**os.environ, "COLUMNS": "100"}).stdout


def commands() -> str:
    from open_clip_mdc.cli import TOOLS
    page = ["# Commands", "What `--help` says."]
    for command in COMMANDS:
        page += [f"## {command}", f"```text\n{help_of(*command.split())}```"]
        if command == "open_clip_mdc":
            page += [line for tool in TOOLS for line in (f"### {tool}", f"```text\n{help_of(command, tool)}```")]
    return "\n\n".join(page)
