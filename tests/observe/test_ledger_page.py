"""The picture of a job's machines and layouts over time (B6, PRO-3, PRO-4)."""

import re

from varuna.observe.ledger import LayoutPeriod, Ledger
from varuna.observe.ledger_page import LEFT, MOST_POINTS, WIDTH, layout_chart


def test_a_job_of_any_number_of_changes_is_drawn_from_its_start_to_its_end() -> None:
    """B6, PRO-3, PRO-4: months of a market have more changes than a picture has pixels."""
    for number in (10, 3 * MOST_POINTS):
        periods = [
            LayoutPeriod(
                at=float(at),
                generation=at + 1,
                layout=f"{at % 3}",
                machines=at % 3 + 1,
                first_step_at=float(at),
            )
            for at in range(number)
        ]
        counts = [(float(at), at % 3 + 1) for at in range(number)]
        picture = layout_chart(Ledger(at=float(number), periods=periods, num_machines=counts))
        areas = re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', picture)
        (line,) = re.findall(r'<polyline points="([^"]+)"', picture)
        points = [float(point.split(",")[0]) for point in line.split()]
        assert 10 <= len(areas) <= MOST_POINTS and len(points) <= 2 * MOST_POINTS + 1
        for left, right in ((areas[0][0], sum(map(float, areas[-1]))), (points[0], points[-1])):
            assert float(left) <= LEFT + 1 and float(right) >= LEFT + WIDTH - 1
        assert sum(float(width) for _, width in areas) > WIDTH - 5
