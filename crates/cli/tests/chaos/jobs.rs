//! Jobs: everything that callers ask for.
//!
//! A new kind of request is a function here and a line in [`JOBS`]. Starts are checked for all jobs alike, by the
//! content that the ledger holds; what a job knows beyond that goes into its own check.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use crate::caller::{Attempt, Caller, Told, judge};
use crate::chance::Chance;
use crate::found::Found;
use crate::judge::Verdict;
use crate::ledger::{Asked, Cancel, Ledger, Standing, count};

type Running<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// A kind of request.
pub struct Job {
    /// Opens the ids of what it asks for, so that a finding names its job.
    pub name: &'static str,
    /// How often it is drawn, in parts of all shares.
    pub share: u64,
    /// Asks until everything is answered; `n` is a random number.
    pub send: for<'a> fn(&'a mut Caller, u64) -> Running<'a>,
    /// Holds what was answered against what is there, once everything has ended.
    pub check: fn(&Ledger, &Found, &mut Verdict),
}

const fn job(name: &'static str, share: u64, send: for<'a> fn(&'a mut Caller, u64) -> Running<'a>) -> Job {
    Job { name, share, send, check: |_, _, _| {} }
}

pub const JOBS: &[Job] = &[
    job("start", 20, start),
    job("once", 4, once),
    job("again", 4, again),
    job("changed", 4, changed),
    job("refused", 2, refused),
    job("bulk", 3, bulk),
    job("wait", 4, wait),
    Job { check: check_signals, ..job("signal", 6, signal) },
    Job { check: check_cancels, ..job("cancel", 4, cancel) },
    Job { check: check_cancels, ..job("race", 4, race) },
];

/// Jobs in a random order, dealt to all callers: each has its exact share of any few dozen, so that the load is the same
/// before and after a fault.
pub struct Deck {
    left: Vec<&'static Job>,
    chance: Chance,
}

impl Deck {
    pub fn of(chance: Chance) -> Self {
        Self { left: Vec::new(), chance }
    }

    pub fn draw(&mut self) -> &'static Job {
        if self.left.is_empty() {
            self.left = JOBS.iter().flat_map(|job| (0..job.share).map(move |_| job)).collect();
            for last in (1..self.left.len()).rev() {
                let other = usize::try_from(self.chance.below(last as u64 + 1)).expect("a pack is small");
                self.left.swap(last, other);
            }
        }
        self.left.pop().expect("a pack is not empty")
    }
}

const FLIGHT: &str = "2013,1,1,517,515,2,830,819,11,UA,1545,N14228,EWR,IAH,227,1400,5,15,2013-01-01T10:00:00Z";

/// The content of a start, from a number.
fn content(n: u64) -> Asked {
    match n % 8 {
        0..=2 => Asked::new("hello", json!({"steps": 1 + n % 7})).marked(n % 1_000_000),
        3 => Asked::new("hello", json!({"steps": 0})),
        4 => Asked::new("flaky", json!({"failures": n % 3})),
        5 | 6 => {
            let seconds = [0.02, 0.1, 0.4][usize::try_from(n % 3).expect("it is small")];
            Asked::new("sleeper", json!({"seconds": seconds, "times": 1 + n % 2}))
        }
        // With its line: looking a row up unpacks the whole year first.
        _ => Asked::new("flight", json!({"row": n % 1_000, "line": FLIGHT})),
    }
}

fn start(caller: &mut Caller, n: u64) -> Running<'_> {
    Box::pin(async move {
        let id = caller.fresh_id();
        caller.start(&id, &content(n)).await;
    })
}

/// A caller that gives up when it is refused, for whatever reason: what it asked for must never happen.
fn once(caller: &mut Caller, n: u64) -> Running<'_> {
    Box::pin(async move {
        let (id, asked) = (caller.fresh_id(), content(n));
        if !caller.start_once(&id, &asked).await
            && let Some((told, _)) = caller.ask(Method::POST, "/v1/workflows", Some(&asked.body(&id))).await
        {
            caller.settle(&id, &told, true);
        }
    })
}

/// The same start again, to any node, is a replay.
fn again(caller: &mut Caller, n: u64) -> Running<'_> {
    Box::pin(async move {
        let (id, asked) = (caller.fresh_id(), content(n));
        if !caller.start(&id, &asked).await {
            return;
        }
        let Some((told, _)) = caller.ask(Method::POST, "/v1/workflows", Some(&asked.body(&id))).await else {
            return caller.ledger.contradiction(format!("{id}: its repetition is never answered"));
        };
        if told.status != 200 || !told.replay {
            caller.ledger.contradiction(format!("{id}: its repetition was answered {told:?}"));
        }
        count(&caller.ledger.tally.replays);
    })
}

/// The same id with another content is a conflict, and changes nothing.
fn changed(caller: &mut Caller, n: u64) -> Running<'_> {
    Box::pin(async move {
        let (id, asked) = (caller.fresh_id(), content(n));
        if !caller.start(&id, &asked).await {
            return;
        }
        let other = Asked { mark: Some(asked.mark.unwrap_or_default() + 1), ..asked };
        let Some((told, _)) = caller.ask(Method::POST, "/v1/workflows", Some(&other.body(&id))).await else {
            return caller.ledger.contradiction(format!("{id}: its other content is never answered"));
        };
        if told.status != 409 || told.code() != "identity_conflict" {
            caller.ledger.contradiction(format!("{id}: another content was answered {told:?}"));
        }
        count(&caller.ledger.tally.conflicts);
    })
}

fn out_of_range(id: &str, asked: &Asked) -> Value {
    let mut body = asked.body(id);
    body["options"] = json!({"priority": 1_000});
    body
}

/// What is refused for good is not there.
fn refused(caller: &mut Caller, n: u64) -> Running<'_> {
    Box::pin(async move {
        let (id, asked) = (caller.fresh_id(), content(n));
        if caller.start_with(&id, &asked, out_of_range(&id, &asked)).await {
            caller.ledger.contradiction(format!("{id}: was accepted with a priority out of range"));
        }
    })
}

/// Several starts in one request, one of them refused for good, one twice. Lines without a definite answer go out again.
fn bulk(caller: &mut Caller, n: u64) -> Running<'_> {
    Box::pin(async move {
        let mut lines: Vec<(String, Value, bool)> = Vec::new();
        for line in 0..4 + n % 12 {
            let (id, asked) = (caller.fresh_id(), content(n + line));
            caller.ledger.sent(&id, &asked);
            let body = if line == 2 { out_of_range(&id, &asked) } else { asked.body(&id) };
            lines.push((id, body, false));
        }
        // Either of the two may turn out to be the replay.
        lines[0].2 = true;
        lines.push(lines[0].clone());
        let before = caller.sent;
        for _ in 0..1_000 {
            let told = bulk_once(caller, &lines).await;
            let mut left = Vec::new();
            for ((id, body, doubt), attempt) in lines.into_iter().zip(told) {
                match attempt {
                    Attempt::Definite(told) => {
                        count(&caller.ledger.tally.answers);
                        caller.settle(&id, &told, doubt);
                    }
                    Attempt::NotNow => left.push((id, body, doubt)),
                    Attempt::Doubt => left.push((id, body, true)),
                }
            }
            if left.is_empty() {
                caller.ledger.tally.sent_most.fetch_max(caller.sent - before, Ordering::Relaxed);
                return;
            }
            lines = left;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    })
}

/// What each line came to.
async fn bulk_once(caller: &mut Caller, lines: &[(String, Value, bool)]) -> Vec<Attempt> {
    let all = |attempt: fn() -> Attempt| lines.iter().map(|_| attempt()).collect::<Vec<_>>();
    let Some(url) = caller.somewhere() else { return all(|| Attempt::NotNow) };
    caller.sent += 1;
    let body: String = lines.iter().map(|(_, body, _)| format!("{body}\n")).collect();
    let request = caller.http.post(format!("{url}/v1/workflows/bulk"));
    let mut response = match request.header("content-type", "application/x-ndjson").body(body).send().await {
        Ok(response) => response,
        Err(error) if error.is_connect() => return all(|| Attempt::NotNow),
        Err(_) => return all(|| Attempt::Doubt),
    };
    if !response.status().is_success() {
        let status = response.status().as_u16();
        let body = response.json().await.unwrap_or_default();
        let refused = matches!(judge(Told { status, replay: false, body }), Attempt::NotNow);
        return if refused { all(|| Attempt::NotNow) } else { all(|| Attempt::Doubt) };
    }
    // Outcomes that came before the connection broke are definite.
    let mut text = Vec::new();
    while let Ok(Some(piece)) = response.chunk().await {
        text.extend_from_slice(&piece);
    }
    let mut told = all(|| Attempt::Doubt);
    for line in text.split_inclusive(|byte| *byte == b'\n').filter(|line| line.ends_with(b"\n")) {
        let outcome: Value = serde_json::from_slice(line).expect("an outcome is JSON");
        let number = usize::try_from(outcome["line"].as_u64().expect("it has a number")).expect("lines are few");
        let at = number.checked_sub(1).and_then(|at| told.get_mut(at)).expect("it is one of those that were sent");
        let error = &outcome["error"];
        *at = if error.is_null() {
            Attempt::Definite(Told { status: 200, replay: outcome["replay"] == true, body: outcome })
        } else {
            let status = u16::try_from(error["status"].as_u64().expect("it has a status")).expect("it is small");
            judge(Told { status, replay: false, body: error.clone() })
        };
    }
    told
}

/// Whoever was answered finds what he was told of, at any node, and hears of its end.
fn wait(caller: &mut Caller, n: u64) -> Running<'_> {
    Box::pin(async move {
        let (id, asked) = (caller.fresh_id(), content(n));
        if !caller.start(&id, &asked).await {
            return;
        }
        let expected = asked.expected();
        for _ in 0..100 {
            let path = format!("/v1/workflows/{id}/result?wait_ms=2000");
            match caller.ask(Method::GET, &path, None).await {
                Some((told, _)) if told.status == 202 => {}
                Some((told, _)) if told.status == 200 && told.body["status"] == expected.status => return,
                other => return caller.ledger.contradiction(format!("{id}: its result was answered {other:?}")),
            }
        }
        caller.ledger.contradiction(format!("{id}: its result is never there"));
    })
}

/// A workflow that takes signals, each sent to any node until it is accepted, and now and then once more.
fn signal(caller: &mut Caller, n: u64) -> Running<'_> {
    Box::pin(async move {
        let (id, signals) = (caller.fresh_id(), 1 + n % 5);
        if !caller.start(&id, &Asked::new("tally", json!({"signals": signals}))).await {
            return;
        }
        let path = format!("/v1/workflows/{id}/signals");
        for number in 0..signals {
            if (n >> number).is_multiple_of(3) {
                tokio::time::sleep(Duration::from_millis(n % 40)).await;
            }
            let signal = format!("{id}-{number}");
            let body = json!({"name": "tick", "signal_id": signal, "payload": number});
            let Some((told, doubt)) = caller.ask(Method::POST, &path, Some(&body)).await else {
                return caller.ledger.contradiction(format!("{signal}: it is never answered"));
            };
            if !told.is_success() || told.replay && !doubt {
                return caller.ledger.contradiction(format!("{signal}: it was answered {told:?}"));
            }
            caller.ledger.signalled(&id, signal.clone());
            if (n >> number).is_multiple_of(4) {
                match caller.ask(Method::POST, &path, Some(&body)).await {
                    Some((told, _)) if told.status == 200 && told.replay => count(&caller.ledger.tally.replays),
                    other => caller.ledger.contradiction(format!("{signal}: its repetition was answered {other:?}")),
                }
            }
        }
    })
}

/// What was accepted was taken, once and in its order.
fn check_signals(ledger: &Ledger, found: &Found, verdict: &mut Verdict) {
    for (id, start) in ledger.starts().iter().filter(|(_, start)| start.asked.name == "tally") {
        let Some(head) = found.head(id) else { continue };
        let received = found.log(head.workflow).iter().filter(|event| event.kind == "signal_received");
        let received: Vec<&str> = received.filter_map(|event| event.payload["signal_id"].as_str()).collect();
        for signal in &start.signals {
            match received.iter().filter(|taken| *taken == signal).count() {
                0 => verdict.lost(id, format!("signal {signal} was accepted, and is not taken")),
                1 => {}
                n => verdict.doubled(id, format!("signal {signal} was taken {n} times")),
            }
        }
        if let Some(ghost) = received.iter().find(|taken| !start.signals.iter().any(|signal| signal == *taken)) {
            verdict.ghost(id, format!("signal {ghost} was taken, and not accepted"));
        }
        if !received.is_sorted() {
            verdict.wrong(id, format!("its signals were taken as {received:?}"));
        }
    }
}

async fn ask_to_cancel(caller: &mut Caller, id: &str) {
    caller.ledger.cancel(id, Cancel::Open);
    let path = format!("/v1/workflows/{id}/cancel");
    let Some((told, _)) = caller.ask(Method::POST, &path, Some(&json!({"reason": "chaos"}))).await else { return };
    count(&caller.ledger.tally.cancels);
    let cancel = match told.body["outcome"].as_str() {
        Some("cancelled") => Cancel::Cancelled,
        Some("already_finished") => {
            Cancel::AlreadyFinished(told.body["status"].as_str().unwrap_or_default().to_owned())
        }
        _ => return caller.ledger.contradiction(format!("{id}: a cancel was answered {told:?}")),
    };
    caller.ledger.cancel(id, cancel);
}

/// A workflow that would sleep for an hour.
fn cancel(caller: &mut Caller, n: u64) -> Running<'_> {
    Box::pin(async move {
        let id = caller.fresh_id();
        if !caller.start(&id, &Asked::new("sleeper", json!({"seconds": 3_600, "times": 1}))).await {
            return;
        }
        ask_to_cancel(caller, &id).await;
        if n.is_multiple_of(4) {
            // Again: it has been cancelled, by whomever.
            ask_to_cancel(caller, &id).await;
        }
    })
}

/// A workflow that may well have ended before.
fn race(caller: &mut Caller, n: u64) -> Running<'_> {
    Box::pin(async move {
        let (id, asked) = (caller.fresh_id(), content(n));
        if !caller.start(&id, &asked).await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(n % 60)).await;
        ask_to_cancel(caller, &id).await;
    })
}

/// A cancel that was answered is what happened.
fn check_cancels(ledger: &Ledger, found: &Found, verdict: &mut Verdict) {
    for (id, start) in ledger.starts().iter() {
        let (Some(cancel), Standing::Accepted, Some(head)) = (&start.cancel, &start.standing, found.head(id)) else {
            continue;
        };
        match cancel {
            Cancel::Open => verdict.stuck(id, "its cancel was never answered"),
            Cancel::Cancelled if head.status != "cancelled" => {
                verdict.lost(id, format!("its cancel was acknowledged, and it is {}", head.status));
            }
            Cancel::AlreadyFinished(status) if head.status != *status => {
                verdict.wrong(id, format!("was said to have ended {status}, and is {}", head.status));
            }
            Cancel::Cancelled | Cancel::AlreadyFinished(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pack_holds_every_job_by_its_share() {
        let mut deck = Deck::of(Chance::of(7));
        let pack = JOBS.iter().map(|job| job.share).sum::<u64>();
        for _ in 0..20 {
            let dealt: Vec<&str> = (0..pack).map(|_| deck.draw().name).collect();
            for job in JOBS {
                let times = dealt.iter().filter(|name| **name == job.name).count();
                assert_eq!(times as u64, job.share, "{}", job.name);
            }
        }
    }
}
