"""Take a picture of the top of a report for the README, in headless Chromium.

    perilune report quickstart --out report.html
    python docs/make_screenshot.py report.html docs/images/report.png

Needs `pip install playwright` and Chromium.
"""

import argparse
import shutil
import sys
from pathlib import Path

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
WIDTH, HEIGHT = 1280, 800


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no Chromium found: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=1.5)
        page.goto(arguments.report.resolve().as_uri())
        page.wait_for_selector("canvas")
        page.screenshot(path=arguments.picture)
        browser.close()


if __name__ == "__main__":
    main()
