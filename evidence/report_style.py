"""The report's style sheet: light and dark, readable in print, no fonts or files to load."""

from __future__ import annotations

STYLE = """
:root{--bg:#f7f7f5;--card:#fff;--ink:#1c1d1f;--soft:#5b5f66;--line:#d9dade;--good:#176a3a;
--good-bg:#e3f4e9;--bad:#a3262a;--bad-bg:#fbe7e6;--open:#7a5200;--open-bg:#fcf1d8;--link:#1d4ed8;
--s0:#0b62c4;--s1:#c2410c;--s2:#0f766e;--s3:#7e22ce;--zone-good:#e3f4e9;--zone-bad:#fbe7e6}
@media(prefers-color-scheme:dark){:root{--bg:#131417;--card:#1c1e22;--ink:#eceef1;--soft:#a6abb4;
--line:#363a41;--good:#7fd6a0;--good-bg:#15321f;--bad:#f5a09c;--bad-bg:#3b1a1b;--open:#f0c674;
--open-bg:#3a2d10;--link:#8ab4ff;--s0:#6aaeff;--s1:#ff9b63;--s2:#5fd0c3;--s3:#cf9bff;
--zone-good:#15321f;--zone-bad:#3b1a1b}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}
main{max-width:62rem;margin:0 auto;padding:1.5rem 1rem 4rem}
header.verdict,section{background:var(--card);border:1px solid var(--line);border-radius:12px;
padding:1.25rem 1.5rem;margin:0 0 1.25rem}
header.verdict{border-left:6px solid var(--open)}
header.verdict.supported{border-left-color:var(--good)}
header.verdict.refuted{border-left-color:var(--bad)}
h1{font-size:1.7rem;line-height:1.25;margin:.1rem 0 .75rem;text-wrap:balance}
h2{font-size:1.2rem;margin:0 0 .5rem}
h3{font-size:1rem;margin:1rem 0 .35rem}
p,ul,dl{margin:.4rem 0 .8rem}
.eyebrow{margin:0;color:var(--soft);font-size:.85rem}
.answer{font-size:1.1rem}
.lead,.muted,figcaption,.eyebrow{color:var(--soft)}
.lead{max-width:46rem}
.issue{border-left:3px solid var(--open);padding-left:.75rem}
.note{border-left:3px solid var(--line);padding-left:.9rem;margin:.75rem 0}
ul.note{list-style:none;font-size:.9rem;color:var(--soft)}
header dl{display:flex;flex-wrap:wrap;gap:.5rem 2rem;margin:1rem 0 0;padding-top:.75rem;
border-top:1px solid var(--line)}
header dt{color:var(--soft);font-size:.8rem}
header dd{margin:0;font-weight:600;overflow-wrap:anywhere}
dl.prose dt{font-weight:600}
dl.prose dd{margin:0 0 .7rem;overflow-wrap:anywhere;max-width:48rem}
.badge{display:inline-block;border-radius:999px;padding:.05rem .65rem;font-size:.85rem;
font-weight:600;background:var(--open-bg);color:var(--open);white-space:nowrap;vertical-align:2px}
.badge.passed{background:var(--good-bg);color:var(--good)}
.badge.failed{background:var(--bad-bg);color:var(--bad)}
.badge.not_applicable{background:transparent;color:var(--soft);border:1px solid var(--line)}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.92rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--soft);font-size:.85rem;padding:.25rem 0}
th,td{text-align:left;vertical-align:top;padding:.4rem .75rem .4rem 0;
border-top:1px solid var(--line);overflow-wrap:break-word}
thead th{border-top:0;color:var(--soft);font-weight:600;font-size:.85rem}
tbody th{font-weight:600}
code{font:.85em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
summary{cursor:pointer;color:var(--link)}
a{color:var(--link)}
summary:focus-visible,a:focus-visible{outline:2px solid var(--link);outline-offset:2px}
figure{margin:.5rem 0}
figure.picture{max-width:46rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(24rem,100%),1fr));gap:1rem}
.charts h3{margin-top:0}
.legend{display:flex;gap:1.25rem;flex-wrap:wrap;margin:.1rem 0;font-size:.9rem}
svg{display:block;width:100%;height:auto;overflow:visible}
svg.key{display:inline-block;width:24px;height:12px;vertical-align:-1px}
svg text{fill:var(--ink);font-size:13px;font-family:inherit}
svg .tick,svg .axis,svg .zone{fill:var(--soft);font-size:12px}
svg .label{font-weight:600}
.supports{fill:var(--zone-good)}
.refutes{fill:var(--zone-bad)}
.margin{stroke:var(--ink);stroke-width:2;stroke-dasharray:5 4}
.interval{stroke:var(--s0);stroke-width:5}
.cap{stroke:var(--s0);stroke-width:3}
.effect{fill:var(--card);stroke:var(--s0);stroke-width:3}
.rule{stroke:var(--soft)}
.grid{stroke:var(--line)}
.curve{fill:none;stroke-width:2.25;stroke-linejoin:round}
.s0 .curve{stroke:var(--s0)}.s0 .mark{fill:var(--s0)}
.s1 .curve{stroke:var(--s1);stroke-dasharray:7 3}.s1 .mark{fill:var(--s1)}
.s2 .curve{stroke:var(--s2);stroke-dasharray:2 3}.s2 .mark{fill:var(--s2)}
.s3 .curve{stroke:var(--s3);stroke-dasharray:9 3 2 3}.s3 .mark{fill:var(--s3)}
@media print{body{background:#fff}header.verdict,section{break-inside:avoid;border-color:#bbb}}
"""


def document(*, title: str, body: str, style: str = STYLE) -> str:
    """A whole page that loads nothing.

    Args:
        title: escaped text.
        body: HTML of the page's main part.
        style: the style sheet.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        f"{body}\n</main>\n</body>\n</html>\n"
    )
