"""The read-only page for operators: one static file that asks `/ui/status` and shows the answer."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

Header = tuple[bytes, bytes]


def page() -> bytes:
    """The page, as it is shipped."""
    return files(__name__).joinpath("index.html").read_bytes()


def headers(html: bytes) -> tuple[Header, ...]:
    """What a browser is told to keep to: this very script and style, no other source, nobody's frame, no copy."""
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(html, b'script')}",
            f"style-src {_hashes(html, b'style')}",
            "connect-src 'self'",
            "form-action 'none'",
            "base-uri 'none'",
            "frame-ancestors 'none'",
        )
    )
    return (
        (b"content-security-policy", policy.encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cache-control", b"no-store"),
    )


def _hashes(html: bytes, tag: bytes) -> str:
    """The source list that lets exactly these inline blocks run."""
    blocks = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), html, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(block).digest()).decode() for block in blocks)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
