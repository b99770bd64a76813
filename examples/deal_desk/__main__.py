"""The commands of the desk, such as `python -m examples.deal_desk report`.

report    print the result, from the record of the upstreams
quiet     stop new filings, halts and headlines from appearing
world     run the simulated upstreams as a separate process
"""

import asyncio

import httpx
import typer

from examples.deal_desk.settings import world as settings
from examples.deal_desk.verdict import Verdict, judge
from examples.deal_desk.world.host import run_world
from examples.deal_desk.world.record import ALLOWED, Everything

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.command()
def report() -> None:
    """Print what the record of the upstreams proves about the desk."""
    record = ask("GET", "/record").text
    for line in lines(judge(Everything.model_validate_json(record))):
        typer.echo(line)


@app.command()
def quiet() -> None:
    """Let nothing new appear until the upstreams are restarted. Work in progress is completed."""
    ask("POST", "/quiet")


@app.command()
def world() -> None:
    """Run the simulated upstreams until Ctrl-C. Set DESK_WORLD_URL of the instances to their address."""
    asyncio.run(run_world(settings))


def ask(method: str, path: str) -> httpx.Response:
    try:
        return httpx.request(method, settings.address + path, timeout=10).raise_for_status()
    except httpx.TransportError as error:
        raise SystemExit(
            f"no upstream answers at {settings.address}: {error}; is an instance of the desk running?"
        ) from None


def lines(verdict: Verdict) -> list[str]:
    """Format the report: one line per claim, with its result."""
    posts = verdict.posts
    alerts = verdict.filings + verdict.halts + verdict.deals
    rates = ", ".join(f"{upstream} {verdict.busiest[upstream]} of {ALLOWED[upstream]}" for upstream in ALLOWED)
    results = {
        "appeared": f"{verdict.filings} filings, {verdict.halts} halts, {verdict.deals} deals: {alerts} alerts",
        "not in the chat": f"{len(verdict.missing)} alerts, {len(verdict.missed)} of them of filings",
        "messages": f"{posts.total()}: {posts['shown']} shown, {posts['refused']} refused, {posts['lost']} lost",
        "shown again": f"{len(verdict.shown_again)}, of which the first was answered: {len(verdict.not_excused)}",
        "busiest second": rates,
        "refused, too many": f"{verdict.too_often.total()}",
        "research": f"{verdict.calls} calls, {verdict.charges} charges, {len(verdict.paid_twice)} deals charged twice",
    }
    return [f"{claim:<18} {how}" for claim, how in results.items()]


if __name__ == "__main__":
    app()
