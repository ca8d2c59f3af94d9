"""Pages in a real browser: Debian's chromium, without a window and without network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars
    --disable-background-networking --disable-component-update --disable-sync
""".split()

needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)"
)

# What a script finds is left in the page, whose source chromium prints once all is quiet.
PROBE = """
<script id="probe" type="application/json"></script>
<script>
"use strict";
const seen = {errors: [], refused: []};
addEventListener("error", event => seen.errors.push(event.message));
addEventListener("unhandledrejection", event => seen.errors.push(String(event.reason)));
document.addEventListener("securitypolicyviolation", event => seen.refused.push(event.blockedURI));
</script>
"""
ASK = """
<script>
setTimeout(async () => {
  if (typeof drawn !== "undefined") await drawn;
  const answer = await (async () => { %s })();
  const resources = performance.getEntriesByType("resource").map(entry => entry.name);
  const text = JSON.stringify({...seen, resources, answer});
  document.getElementById("probe").textContent = text.replaceAll("<", "\\\\u003c");
}, 500);
</script>
"""


def ask(page: Path, script: str, folder: Path) -> dict[str, Any]:
    """Open a copy of a page; `answer` is what the body of an async function returned there.

    Also: `errors` of scripts, `refused` addresses, `resources` that were fetched.
    """
    text = page.read_text(encoding="utf-8")
    text = text.replace("<body>", "<body>" + PROBE, 1)
    head, _, tail = text.rpartition("</body>")
    copy = folder / "asked.html"
    copy.write_text(head + ASK % script + "</body>" + tail, encoding="utf-8")
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            *[CHROMIUM, *FLAGS, "--window-size=1280,2000", "--virtual-time-budget=60000"],
            *[f"--user-data-dir={folder / 'profile'}", "--dump-dom", copy.as_uri()],
        ],
        capture_output=True,
        text=True,
        timeout=150,
    )
    found = re.search(r'<script id="probe"[^>]*>(.*?)</script>', done.stdout, re.DOTALL)
    assert found and found.group(1), f"the page did not answer: {done.stderr[-2000:]}"
    return json.loads(found.group(1))
