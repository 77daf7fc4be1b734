"""A drawing made of boxes, lines and text, as SVG."""

from __future__ import annotations

WIDTH = 760
COMPUTE, PALE = "#1f4e79", "#c9dcef"
FONT = "font-family='DejaVu Sans, Verdana, sans-serif'"


class Drawing:
    """Shapes on a white ground."""

    def __init__(self, height: int, title: str) -> None:
        self.height, self.title = height, title
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, text: str, kind: str) -> None:
        """A labelled box: "compute", "forward", "wire" or "leaf"."""
        fill = {"compute": COMPUTE, "forward": PALE, "wire": "url(#wire)", "leaf": "white"}[kind]
        self.parts.append(
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' fill='{fill}' stroke='black'/>"
        )
        if kind == "wire" and text:  # a plain ground, or the hatching makes the label hard to read
            wide = 6.9 * len(text) + 6
            self.parts.append(
                f"<rect x='{x + width / 2 - wide / 2:g}' y='{y + height / 2 - 8:g}' width='{wide:g}' height='16' "
                "fill='white'/>"
            )
        color = "white" if kind == "compute" else "black"
        self.text(x + width / 2, y + height / 2 + 4.5, text, anchor="middle", color=color)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "start",
        color: str = "black",
        size: int = 13,
    ) -> None:
        """One line, its baseline at ``y``."""
        safe = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        self.parts.append(
            f"<text x='{x:g}' y='{y:g}' text-anchor='{anchor}' fill='{color}' font-size='{size}'>{safe}</text>"
        )

    def line(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        *,
        dashed: bool = False,
        arrow: bool = False,
    ) -> None:
        """A thin line."""
        more = " stroke-dasharray='4 3'" if dashed else ""
        more += " marker-end='url(#arrow)'" if arrow else ""
        self.parts.append(
            f"<line x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}' stroke='black'{more}/>"
        )

    def brace(self, x1: float, x2: float, y: float, text: str) -> None:
        """A bracket from ``x1`` to ``x2`` with a label below."""
        self.line(x1 + 2, y, x1 + 2, y + 7)
        self.line(x2 - 2, y, x2 - 2, y + 7)
        self.line(x1 + 2, y + 7, x2 - 2, y + 7)
        self.text((x1 + x2) / 2, y + 23, text, anchor="middle")

    def svg(self) -> str:
        """The file's text."""
        head = (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {self.height}' width='{WIDTH}' "
            f"height='{self.height}' {FONT}>\n<title>{self.title}</title>\n<defs>\n"
            "<pattern id='wire' width='7' height='7' patternUnits='userSpaceOnUse' patternTransform='rotate(45)'>"
            "<rect width='7' height='7' fill='#f5e6c8'/><line x1='0' y1='0' x2='0' y2='7' stroke='#777' "
            "stroke-width='2'/></pattern>\n"
            "<marker id='arrow' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='8' markerHeight='8' orient='auto'>"
            "<path d='M0 0 L8 4 L0 8 z'/></marker>\n</defs>\n"
            f"<rect width='{WIDTH}' height='{self.height}' fill='white'/>\n"
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"
