"""Write the table of models.md from model_configs/objectives.json.    python docs/models.py"""
from pathlib import Path

from open_clip_mdc.data.markdown import markdown_table
from open_clip_mdc.integration.configs import GROUPS, ROWS

PAGE = Path(__file__).with_suffix(".md")
START, END = "<!-- models: python docs/models.py writes this table -->\n", "<!-- end -->"
SHOWN = ("objective", "t_min", "t_max", "loss_weight")


def table() -> str:
    rows = []
    for group in GROUPS.values():
        for pattern in group["rows"]:
            cfg = ROWS[pattern]
            others = ", ".join(f"{name} {value}" for name, value in cfg.items() if name not in SHOWN)
            interval = f"{cfg['t_min']} to {cfg['t_max']}" if "t_min" in cfg else ""
            weight = {"inverse_t": "1/t"}.get(cfg.get("loss_weight"), cfg.get("loss_weight", ""))
            rows.append([f"`{pattern.replace('*', 'BASE')}`", f"`{cfg['objective']}`", interval, weight, others])
    return markdown_table(["name", "objective", "t", "weight", "further settings"], rows)


def page() -> str:
    """Return models.md with the table renewed."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    return f"{before}{START}{table().strip()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
