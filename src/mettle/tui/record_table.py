"""A table that draws only the rows that are seen, so that ten thousand cost as much as ten.

Parts: `Column`, `Cell`, `RecordTable`. The owner says how many rows there are and gives the cells of any of them; the
table keeps a cursor, follows keys and mouse, and says which row was chosen and which column's head was clicked.
Invariants: no row is kept; every cell is drawn through `text.pad`, so nothing in it can leave its column; where the
terminal is narrow, the columns of the lowest rank go first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from mettle.tui.text import pad
from mettle.wording import one_line

GAP = 2
TONES = ("header", "dim", "good", "middling", "bad", "strong", "accent", "mark")


@dataclass(frozen=True, slots=True)
class Column:
    """A column. `width` 0 takes what is left, but at least `min_width`; `rank` 0 is always shown."""

    key: str
    title: str
    width: int = 0
    is_right: bool = False
    rank: int = 0
    min_width: int = 12
    is_sortable: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """A text and the tone that it is drawn in, one of `TONES`."""

    text: str
    tone: str = ""


class RecordTable(ScrollView, can_focus=True, inherit_bindings=False):
    """Rows under a head that stays."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"table--{tone}" for tone in (*TONES, "cursor", "cursor-blurred", "row")}
    DEFAULT_CSS = """
    RecordTable { height: 1fr; overflow-x: hidden; overflow-y: auto; scrollbar-size-vertical: 1; }
    RecordTable > .table--header { color: $muted; text-style: bold; }
    RecordTable > .table--row { color: $foreground; }
    RecordTable > .table--dim { color: $muted; }
    RecordTable > .table--good { color: $success; }
    RecordTable > .table--middling { color: $warning; }
    RecordTable > .table--bad { color: $error; }
    RecordTable > .table--strong { text-style: bold; }
    RecordTable > .table--accent { color: $accent; }
    RecordTable > .table--mark { color: $secondary; text-style: bold; }
    RecordTable > .table--cursor { background: $primary 30%; text-style: bold; }
    RecordTable > .table--cursor-blurred { background: $primary 12%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "choose", "Open"),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("pagedown,space,ctrl+f,ctrl+d", "page(1)", "Page down", show=False),
        Binding("pageup,ctrl+b,ctrl+u", "page(-1)", "Page up", show=False),
        Binding("home,g", "jump(0)", "First", show=False),
        Binding("end,G", "jump(-1)", "Last", show=False),
    ]

    cursor: reactive[int] = reactive(0)

    class Chosen(Message):
        """A row was opened."""

        def __init__(self, table: RecordTable, row: int) -> None:
            super().__init__()
            self.table, self.row = table, row

        @property
        def control(self) -> RecordTable:
            return self.table

    class Moved(Message):
        """The cursor stands on another row."""

        def __init__(self, table: RecordTable, row: int) -> None:
            super().__init__()
            self.table, self.row = table, row

        @property
        def control(self) -> RecordTable:
            return self.table

    class HeadClicked(Message):
        """The head of a column that can be sorted by was clicked."""

        def __init__(self, table: RecordTable, key: str) -> None:
            super().__init__()
            self.table, self.key = table, key

        @property
        def control(self) -> RecordTable:
            return self.table

    def __init__(self, columns: Sequence[Column], *, id: str | None = None, empty: str = "nothing here") -> None:
        super().__init__(id=id)
        self.columns = list(columns)
        self.empty = empty
        self.num_rows = 0
        self.sorted_by: tuple[str, bool] | None = None
        self._cells: Callable[[int], Sequence[Cell]] = lambda row: ()

    def show(self, num_rows: int, cells: Callable[[int], Sequence[Cell]] | None = None) -> None:
        """Have this many rows, whose cells `cells` gives in the order of the columns."""
        self._cells = cells or self._cells
        self.num_rows = num_rows
        self.virtual_size = Size(self.size.width, num_rows + 1)
        if self.styles.is_auto_height:
            self.refresh(layout=True)
        self.cursor = max(0, min(self.cursor, num_rows - 1))
        self.refresh()

    def show_columns(self, columns: Sequence[Column]) -> None:
        """Have other columns."""
        self.columns = list(columns)
        self.refresh()

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """All rows, where there is room for them."""
        return self.num_rows + 1

    def widths(self, total: int) -> list[tuple[int, int]]:
        """The columns that fit, by their number, with their width."""
        for rank in range(max((column.rank for column in self.columns), default=0), -1, -1):
            shown = [(number, column) for number, column in enumerate(self.columns) if column.rank <= rank]
            fixed = sum(column.width or column.min_width for _, column in shown) + GAP * len(shown)
            if fixed <= total or rank == 0:
                break
        flexible = [column for _, column in shown if not column.width]
        spare = max(0, total - fixed)
        more = spare // len(flexible) if flexible else 0
        return [(number, column.width or column.min_width + more) for number, column in shown]

    def validate_cursor(self, cursor: int) -> int:
        """Stay on a row that there is."""
        return max(0, min(cursor, self.num_rows - 1))

    def watch_cursor(self, before: int, after: int) -> None:
        """See the row, and tell."""
        self._see_cursor()
        self.refresh()
        if before != after:
            self.post_message(self.Moved(self, after))

    def render_line(self, y: int) -> Strip:
        """A line of the screen."""
        width = self.size.width
        if y == 0:
            return self._head(width)
        row = y - 1 + round(self.scroll_offset.y)
        if row >= self.num_rows:
            is_hint = self.num_rows == 0 and y == 2
            style = self.get_component_rich_style("table--dim")
            return Strip([Segment(pad(f" {self.empty}" if is_hint else "", width), style)], width)
        return self._row(row, width)

    def on_resize(self, event: events.Resize) -> None:
        """Fit the columns to the new width."""
        self.virtual_size = Size(event.size.width, self.num_rows + 1)
        self._see_cursor()

    def on_click(self, event: events.Click) -> None:
        """Sort by a head, go to a row, open the row that the cursor is on."""
        if event.y == 0:
            self._click_head(event.x)
            return
        row = event.y - 1 + round(self.scroll_offset.y)
        if row >= self.num_rows:
            return
        if row == self.cursor:
            self.post_message(self.Chosen(self, row))
        self.cursor = row

    def action_choose(self) -> None:
        """Open the row that the cursor is on."""
        if self.num_rows:
            self.post_message(self.Chosen(self, self.cursor))

    def action_move(self, by: int) -> None:
        """Go up or down."""
        self.cursor += by

    def action_page(self, by: int) -> None:
        """Go up or down by what is seen."""
        self.cursor += by * max(1, self.size.height - 2)

    def action_jump(self, to: int) -> None:
        """Go to the first or the last row."""
        self.cursor = to if to >= 0 else self.num_rows - 1

    def _see_cursor(self) -> None:
        height = max(1, self.size.height - 1)
        top = round(self.scroll_target_y)
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False, immediate=True)
        elif self.cursor >= top + height:
            self.scroll_to(y=self.cursor - height + 1, animate=False, immediate=True)

    def _click_head(self, x: int) -> None:
        at = 0
        for number, width in self.widths(self.size.width):
            if at <= x < at + width + GAP and self.columns[number].is_sortable:
                self.post_message(self.HeadClicked(self, self.columns[number].key))
            at += width + GAP

    def _head(self, width: int) -> Strip:
        style = self.get_component_rich_style("table--header")
        cells = []
        for column in self.columns:
            arrow = ""
            if self.sorted_by is not None and self.sorted_by[0] == column.key:
                arrow = " \N{DOWNWARDS ARROW}" if self.sorted_by[1] else " \N{UPWARDS ARROW}"
            cells.append(Cell(column.title + arrow))
        return self._line(cells, width, lambda _: style, style)

    def _row(self, row: int, width: int) -> Strip:
        base = self.get_component_rich_style("table--row")
        if row == self.cursor:
            base += self.get_component_rich_style("table--cursor" if self.has_focus else "table--cursor-blurred")
        background = Style(bgcolor=base.bgcolor, bold=base.bold)

        def style_of(tone: str) -> Style:
            return base if not tone else self.get_component_rich_style(f"table--{tone}") + background

        return self._line(self._cells(row), width, style_of, base)

    def _line(self, cells: Sequence[Cell], width: int, style_of: Callable[[str], Style], base: Style) -> Strip:
        segments = []
        for number, room in self.widths(width):
            cell = cells[number]
            text = pad(one_line(cell.text), room, is_right=self.columns[number].is_right)
            segments += [Segment(" ", base), Segment(text, style_of(cell.tone)), Segment(" ", base)]
        return Strip(segments).adjust_cell_length(width, base)
