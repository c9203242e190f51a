"""The page against WCAG 2.2 AA in a real browser: structure, contrast, keyboard, names, languages, paper.

The checks are those of axe-core's rules named beside them, where a rule can be decided on a page without widgets.
"""

from __future__ import annotations

import base64
import re
import zlib

import pytest

# duplicate-id, aria-valid-attr-value, image-alt, svg-img-alt, scope-attr-valid, empty-table-header, link-name,
# button-name, heading-order, page-has-heading-one, html-has-lang, valid-lang, document-title, list, definition-list.
STRUCTURE = """(() => {
  const bad = [], all = s => [...document.querySelectorAll(s)];
  const ids = all('[id]').map(e => e.id);
  ids.filter((x, i) => ids.indexOf(x) !== i).forEach(x => bad.push('duplicate id ' + x));
  all('[aria-labelledby]').forEach(e => {
    const to = document.getElementById(e.getAttribute('aria-labelledby'));
    if (!to || !to.innerText.trim()) bad.push('no name: ' + e.outerHTML.slice(0, 90)); });
  all('[aria-label]').forEach(e => { if (!e.getAttribute('aria-label').trim()) bad.push('empty aria-label'); });
  all('svg:not([role=img])').forEach(e => {
    if (!e.closest('[aria-hidden=true]')) bad.push('svg is neither named nor hidden'); });
  all('img').forEach(e => { if (!e.alt) bad.push('img without alt'); });
  all('table').forEach(e => {
    if (!e.caption || !e.caption.innerText.trim()) bad.push('table without caption: ' + e.innerText.slice(0, 60));
    if (!e.querySelector('th')) bad.push('table without headers');
    const wide = Math.max(...[...e.rows].map(r => r.cells.length));
    [...e.rows].forEach(r => {
      if (r.cells.length !== wide) bad.push('ragged table: ' + r.innerText.slice(0, 60)); }); });
  all('th').forEach(e => { if (!e.scope) bad.push('th without scope: ' + e.innerText);
    if (!e.innerText.trim()) bad.push('empty header: ' + e.closest('table').caption.innerText); });
  all('a[href^="#"]').forEach(e => {
    if (!document.getElementById(e.hash.slice(1))) bad.push('dead link ' + e.hash);
    if (!e.innerText.trim()) bad.push('link without text'); });
  all('button').forEach(e => {
    if (!(e.getAttribute('aria-label') || e.innerText.trim())) bad.push('button without a name');
    const box = e.getBoundingClientRect();
    if (box.width < 24 || box.height < 24) bad.push('button smaller than 24 px');
    if (e.tabIndex < 0) bad.push('button out of reach'); });
  let level = 0;
  all('h1,h2,h3,h4').forEach(e => { const n = +e.tagName[1];
    if (n > level + 1) bad.push('heading jumps: ' + e.innerText);
    if (!e.innerText.trim()) bad.push('empty heading'); level = n; });
  if (all('h1').length !== 1) bad.push('not one h1');
  if (all('main').length !== 1) bad.push('not one main');
  all('ul').forEach(e => { if ([...e.children].some(c => c.tagName !== 'LI')) bad.push('a list of other things'); });
  all('[lang]').forEach(e => { const lang = e.getAttribute('lang');
    if (!['en', 'zh'].includes(lang)) bad.push('lang ' + lang); });
  all('[tabindex]').forEach(e => { if (e.tabIndex > 0) bad.push('positive tabindex'); });
  all('.scroll').forEach(e => { if (e.tabIndex !== 0) bad.push('scrolls by mouse only'); });
  if (!document.documentElement.lang || !document.title) bad.push('no language or title');
  return bad; })()"""

# WCAG 1.4.3: 4.5 to 1 for every text against the nearest opaque background; 1.4.11: 3 to 1 for what is drawn.
CONTRAST = """(() => {
  const rgb = s => s.match(/[\\d.]+/g).map(Number);
  const lum = c => { const f = c.slice(0, 3).map(v => { v /= 255;
    return v <= 0.03928 ? v / 12.92 : Math.pow((v + 0.055) / 1.055, 2.4); });
    return 0.2126 * f[0] + 0.7152 * f[1] + 0.0722 * f[2]; };
  const behind = e => { for (let at = e; at; at = at.parentElement) {
    const b = rgb(getComputedStyle(at).backgroundColor); if (b.length === 3 || b[3] === 1) return b; } };
  const ratio = (a, b) => { const [x, y] = [lum(a), lum(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
  const bad = new Set();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !e.getClientRects().length || e.closest('script')) continue;
    const style = getComputedStyle(e);
    const ink = rgb(e.closest('svg') ? style.fill : style.color);
    if (ratio(ink, behind(e)) < 4.5) bad.add(e.tagName + ' ' + e.innerHTML.slice(0, 40));
  }
  document.querySelectorAll('svg .line:not(.faint), svg .roof, svg .axis').forEach(e => {
    if (ratio(rgb(getComputedStyle(e).stroke), behind(e)) < 3) bad.add('line ' + e.getAttribute('class')); });
  document.querySelectorAll('svg rect, svg circle').forEach(e => {
    if (ratio(rgb(getComputedStyle(e).fill), behind(e)) < 3) bad.add('shape ' + e.getAttribute('class')); });
  return [...bad]; })()"""

LINES = """(() => { const seen = s => getComputedStyle(document.querySelector(s));
  return [...document.querySelectorAll('svg.plot')].map(p => [...p.querySelectorAll('.line:not(.faint)')].map(
    e => getComputedStyle(e).strokeDasharray)); })()"""


def prefer(chromium, scheme, media=""):
    chromium.call(
        "Emulation.setEmulatedMedia",
        media=media,
        features=[{"name": "prefers-color-scheme", "value": scheme}],
    )


@pytest.fixture
def opened(folder, chromium):
    """The browser on the page with everything, folded parts open; its settings are put back afterwards."""
    chromium.open(folder / "after-report.html")
    chromium.eval("document.querySelectorAll('details').forEach(d => d.open = true)")
    yield chromium
    prefer(chromium, "light")
    chromium.call("Emulation.clearDeviceMetricsOverride")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_structure(opened, language):
    opened.eval(f"document.querySelector('[data-language={language}]').click()")
    assert opened.eval(STRUCTURE) == []


@pytest.mark.parametrize(
    ("system", "chosen"), [("light", ""), ("dark", ""), ("light", "dark"), ("dark", "light")]
)
def test_contrast(opened, system, chosen):
    """Both themes, as the system prefers them and as the buttons choose them."""
    prefer(opened, system)
    if chosen:
        opened.eval(f"document.querySelector('[data-theme={chosen}]').click()")
    dark = (chosen or system) == "dark"
    red = int(opened.eval("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]"))
    assert (red < 60) == dark
    assert opened.eval(CONTRAST) == []


def test_lines_differ_by_more_than_their_color(opened):
    """WCAG 1.4.1: the lines of one plot have dashes of their own."""
    for dashes in opened.eval(LINES):
        assert len(set(dashes)) == len(dashes)


def test_landmarks_and_names(opened):
    nodes = opened.call("Accessibility.getFullAXTree")["nodes"]
    named = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if "role" in n]
    roles = [role for role, _ in named]
    for landmark in ("banner", "navigation", "main", "contentinfo"):
        assert roles.count(landmark) == 1, landmark
    regions = [name for role, name in named if role == "region"]
    assert all(regions)
    assert len(set(regions)) == len(regions), "regions of one name"
    images = [name for role, name in named if role in ("image", "img")]
    assert {"Loss", "Learning rate", "Roofline: speed over FLOP per byte"} <= set(images)
    assert all(images)
    # Everything that can be pressed says what it is.
    assert all(name for role, name in named if role in ("button", "link", "DisclosureTriangle"))


def press(chromium, key, code=0, text="", modifiers=0):
    for kind in ("keyDown", "keyUp"):
        more = {"text": text} if text and kind == "keyDown" else {}
        chromium.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                      modifiers=modifiers, **more)  # fmt: skip


# What has the focus: its place in the order of the document.
FOCUS = """(() => { const all = [...document.querySelectorAll('a, button, summary, [tabindex="0"]')];
  return all.indexOf(document.activeElement); })()"""


def test_tab_goes_through_everything_in_order(folder, chromium):
    chromium.open(folder / "after-report.html")
    count = chromium.eval("document.querySelectorAll('a, button, summary, [tabindex=\"0\"]').length")
    order, rings = [], []
    for _ in range(count + 1):
        press(chromium, "Tab", 9)
        place = chromium.eval(FOCUS)
        if place < 0:
            break
        order.append(place)
        rings.append(chromium.eval("getComputedStyle(document.activeElement).outlineStyle"))
    assert order == sorted(set(order)), "focus jumps"
    # What is folded away is skipped; everything else is reached, and the focus leaves the page at its end.
    every = "[...document.querySelectorAll('a, button, summary, [tabindex=\"0\"]')]"
    hidden = chromium.eval(f"{every}.filter(e => !e.checkVisibility()).length")
    assert len(order) >= count - hidden - chromium.eval("document.querySelectorAll('details .scroll').length")
    assert set(rings) == {"solid"}, "a focus that cannot be seen"


def test_skip_link_and_language_switch_by_keyboard(folder, chromium):
    chromium.open(folder / "after-report.html")
    press(chromium, "Tab", 9)
    assert chromium.eval("document.activeElement.className") == "skip"
    assert chromium.eval("document.activeElement.getBoundingClientRect().left >= 0")
    press(chromium, "Enter", 13, "\r")
    assert chromium.eval("document.activeElement.id") == "content"
    chromium.eval("document.querySelector('[data-language=en]').focus()")
    press(chromium, "Tab", 9)
    assert chromium.eval("document.activeElement.dataset.language") == "zh"
    press(chromium, " ", 32, " ")
    assert chromium.eval("document.documentElement.lang") == "zh"
    assert (
        chromium.eval("document.querySelector('[data-language=en]').getAttribute('aria-pressed')") == "false"
    )
    # A screen reader hears the heading in the language that is shown, and nothing of the other.
    nodes = chromium.call("Accessibility.getFullAXTree")["nodes"]
    headings = [n["name"]["value"] for n in nodes if n.get("role", {}).get("value") == "heading"]
    assert "环境" in headings
    assert not [h for h in headings if re.search("Environment|Migration", h)]
    # Each of the two keeps its own name in its own language.
    assert chromium.eval("document.querySelector('[data-language=en]').innerText") == "English"
    press(chromium, "Tab", 9, modifiers=8)
    press(chromium, "Enter", 13, "\r")
    assert chromium.eval("document.documentElement.lang") == "en"


def test_folded_parts_open_by_keyboard(folder, chromium):
    chromium.open(folder / "after-report.html")
    chromium.eval("document.querySelector('details summary').focus()")
    press(chromium, "Enter", 13, "\r")
    assert chromium.eval("document.querySelector('details').open")


@pytest.mark.parametrize("width", [320, 1200])
def test_reflows(opened, width):
    """WCAG 1.4.10: no sideways scrolling of the page at 320 px; tables scroll in themselves."""
    opened.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=700, deviceScaleFactor=1, mobile=False
    )
    assert opened.eval("document.documentElement.scrollWidth") <= width


def test_larger_text_does_not_break_the_page(opened):
    """WCAG 1.4.4: text at 200 %."""
    opened.call(
        "Emulation.setDeviceMetricsOverride", width=1280, height=700, deviceScaleFactor=1, mobile=False
    )
    opened.eval("document.documentElement.style.fontSize = '200%'; document.body.style.fontSize = '200%'")
    assert opened.eval("document.documentElement.scrollWidth") <= 1280


def test_paper(folder, chromium):
    """Printed: black on white in either theme, no buttons, what was folded away is there, and is folded again."""
    chromium.open(folder / "after-report.html")
    chromium.eval("document.querySelector('[data-theme=dark]').click()")
    folded = chromium.eval("document.querySelectorAll('details:not([open])').length")
    assert folded > 3
    prefer(chromium, "dark", media="print")
    assert chromium.eval("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    for selector in ("nav", ".tools", ".skip"):
        assert chromium.eval(f"getComputedStyle(document.querySelector('{selector}')).display") == "none"
    assert chromium.eval("getComputedStyle(document.querySelector('.scroll')).overflowX") == "visible"
    chromium.eval("window.dispatchEvent(new Event('beforeprint'))")
    assert chromium.eval("document.querySelectorAll('details:not([open])').length") == 0
    assert chromium.eval(CONTRAST) == []
    chromium.eval("window.dispatchEvent(new Event('afterprint'))")
    assert chromium.eval("document.querySelectorAll('details:not([open])').length") == folded
    prefer(chromium, "light")
    pdf = base64.b64decode(chromium.call("Page.printToPDF", printBackground=True)["data"])
    assert pdf.startswith(b"%PDF")
    assert pages(pdf) >= 3


def pages(pdf: bytes) -> int:
    """Pages of a PDF, also where its objects are in compressed streams."""
    texts = [pdf]
    for found in re.finditer(rb"stream\r?\n(.*?)endstream", pdf, re.DOTALL):
        try:
            texts.append(zlib.decompress(found.group(1)))
        except zlib.error:
            continue
    return sum(len(re.findall(rb"/Type\s*/Page\b(?!s)", text)) for text in texts)


def test_no_complaint_and_no_request_whatever_is_pressed(folder, chromium):
    chromium.open(folder / "after-report.html")
    for selector in ("[data-language]", "[data-theme]", "summary", "nav a"):
        chromium.eval(f"document.querySelectorAll('{selector}').forEach(e => e.click())")
    assert chromium.complaints() == []
