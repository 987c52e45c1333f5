"""A hook of mkdocs.yml: pages of the site whose files are not in docs/, links to them, the page of
commands, and llms.txt.
"""

from __future__ import annotations

import posixpath
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from streammega.cli.main import COMMANDS, EXIT_CODES, app  # noqa: E402  # the package of this checkout

OUTSIDE = {"README.md": "index.md"} | {
    name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE")
}
"""Files outside of docs/ that are on the site, by their place there."""
EXAMPLES = "tools/examples"
LINK = re.compile(r"(\]\()(?!\w+:)([^)#\s]+)")
CELL = re.compile(r"<td>.*?</td>", re.S)
LINKED = re.compile(r"\[([^]]*)\]\([^)]*\)")


def on_config(config: Any) -> Any:
    """The addresses of pyproject.toml, where it has some."""
    addresses = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    config.repo_url = addresses.get("Repository")
    config.site_url = addresses.get("Documentation")
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside of docs/, with their links as they are on the site."""
    for name, place in OUTSIDE.items():
        text = (ROOT / name).read_text()
        if name.endswith(".md"):
            text = with_links_of_the_site(text, name)
        files.append(File.generated(config, place, content=text))
    files.append(File.generated(config, "examples.md", content=examples_page()))
    files.append(File.generated(config, "commands.md", content=commands_page()))
    return files


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    source = page.file.src_uri
    return text if source in OUTSIDE.values() else with_links_of_the_site(text, f"docs/{source}")


def on_page_content(html: str, **_: Any) -> str:
    """Without the backslashes that GitHub needs before `|` in the code of tables."""
    return CELL.sub(lambda found: found[0].replace("\\|", "|"), html)


def on_env(env: Any, config: Any, files: Files) -> Any:
    """Write llms.txt: a line for each page in the order of the navigation, as https://llmstxt.org
    has it, with the pages as Markdown.
    """
    site = Path(config.site_dir)
    lines = [f"# {config.site_name}", f"> {config.site_description}"]
    markdown = {
        file.src_uri: file.page.markdown or "" for file in files.documentation_pages() if file.page
    }
    site.mkdir(parents=True, exist_ok=True)
    for source, text in markdown.items():
        (site / source).write_text(text)
    for item in config.nav:
        ((section, pages),) = item.items()
        lines.append(f"\n## {section}\n")
        for entry in pages if isinstance(pages, list) else [item]:
            ((title, source),) = entry.items()
            lines.append(f"- [{title}]({source}): {first_sentence(markdown[source])}")
    (site / "llms.txt").write_text("\n".join(lines) + "\n")
    return env


def first_sentence(text: str) -> str:
    """The first sentence under the title of a page."""
    paragraphs = [
        part for part in text.split("\n\n") if part and not part.startswith(("#", "```", "|"))
    ]
    plain = LINKED.sub(r"\1", " ".join(paragraphs[0].split())).replace("**", "")
    return re.split(r"(?<=[.:?!]) ", plain)[0]


def with_links_of_the_site(text: str, source: str) -> str:
    """The text with links between files of the repository made links between files of the site.

    source: the path of the text's file in the repository.
    """
    here = posixpath.dirname(site_path(source))

    def link(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[2]))
        return found[1] + posixpath.relpath(site_path(path), here or ".")

    return LINK.sub(link, text)


def site_path(path: str) -> str:
    """Where a file of the repository is on the site."""
    if path.startswith(EXAMPLES):
        name = path.removeprefix(EXAMPLES).strip("/")
        return f"examples.md#{name.replace('.', '')}" if name else "examples.md"
    return OUTSIDE.get(path) or path.removeprefix("docs/")


def examples_page() -> str:
    """The example programs, as they are in the repository."""
    parts = [f"# Examples\n\nPrograms of `{EXAMPLES}`.\n"]
    for path in sorted((ROOT / EXAMPLES).glob("*.py")):
        parts.append(f"## {path.name}\n\n```python\n{path.read_text()}```\n")
    return "\n".join(parts)


def commands_page() -> str:
    """Every command with its help, its arguments and its options."""
    parts = [f"# Commands\n\nWhat `--help` prints, of every command.\n\n{EXIT_CODES}\n"]
    parts.append(
        "`streammega --install-completion` completes commands and options in your shell.\n"
    )
    for name, command in commands(typer.main.get_command(app), "streammega"):
        options = [
            " ".join(param.opts) for param in command.params if param.param_type_name != "argument"
        ]
        arguments = [param.name for param in command.params if param.param_type_name == "argument"]
        usage = " ".join([name, *(["[OPTIONS]"] if options else []), *arguments])
        examples = "\n".join(COMMANDS[name.removeprefix("streammega ")].examples)
        parts += [f"## {name}\n", f"{command.help}\n", f"```\n{usage}\n```\n"]
        parts += [f"```sh\n{examples}\n```\n", "| | |", "|---|---|"]
        for param in command.params:
            shown = param.name if param.name in arguments else ", ".join(param.opts)
            text = " ".join((param.help or "").split()).replace("|", "\\|").replace("<", "&lt;")
            parts.append(f"| `{shown}` | {text} |")
        parts.append("")
    return "\n".join(parts)


def commands(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The commands of a group and of groups in it, by what is typed."""
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command
