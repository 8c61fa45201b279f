//! Judge: holds what the callers know against what is in the store. Pure.
//!
//! ```text
//! lost      acknowledged, and not there, not with the content that was asked for, or not done
//! ghost     there, and refused for certain or never asked for
//! doubled   there more than once: a workflow, or a step's commit
//! stuck     without an end, or a request without an answer
//! wrong     everything else that contradicts what was answered or what a log may hold
//! ```

use std::collections::BTreeSet;
use std::fmt;

use crate::found::{ENDS, Event, Found, Head};
use crate::jobs::JOBS;
use crate::ledger::{Asked, Cancel, Expected, Ledger, Standing, Start};

#[derive(Debug, Default)]
pub struct Verdict {
    pub lost: Vec<String>,
    pub ghosts: Vec<String>,
    pub doubled: Vec<String>,
    pub stuck: Vec<String>,
    pub wrong: Vec<String>,
    /// Steps that were handed out again. No fault.
    pub redelivered: usize,
}

impl Verdict {
    pub fn lost(&mut self, id: &str, why: impl fmt::Display) {
        self.lost.push(format!("{id}: {why}"));
    }

    pub fn ghost(&mut self, id: &str, why: impl fmt::Display) {
        self.ghosts.push(format!("{id}: {why}"));
    }

    pub fn doubled(&mut self, id: &str, why: impl fmt::Display) {
        self.doubled.push(format!("{id}: {why}"));
    }

    pub fn stuck(&mut self, id: &str, why: impl fmt::Display) {
        self.stuck.push(format!("{id}: {why}"));
    }

    pub fn wrong(&mut self, id: &str, why: impl fmt::Display) {
        self.wrong.push(format!("{id}: {why}"));
    }

    pub fn is_clean(&self) -> bool {
        self.lists().iter().all(|(_, list)| list.is_empty())
    }

    fn lists(&self) -> [(&'static str, &Vec<String>); 5] {
        [
            ("lost", &self.lost),
            ("ghost", &self.ghosts),
            ("doubled", &self.doubled),
            ("stuck", &self.stuck),
            ("wrong", &self.wrong),
        ]
    }

    /// What was found, a few of each kind.
    pub fn findings(&self) -> String {
        let few = |(kind, list): (&str, &Vec<String>)| {
            list.iter().take(10).map(|what| format!("{kind} {what}\n")).collect::<String>()
        };
        self.lists().map(few).concat()
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let figures = self.lists().map(|(kind, list)| format!("{kind} {}", list.len()));
        // The last is a list of its own, and said when there is something in it.
        f.write_str(&figures[..4].join(" / "))?;
        if self.wrong.is_empty() { Ok(()) } else { write!(f, " / {}", figures[4]) }
    }
}

pub fn judge(ledger: &Ledger, found: &Found) -> Verdict {
    let mut verdict = Verdict { wrong: ledger.contradictions(), ..Verdict::default() };
    let starts = ledger.starts().clone();
    for (id, start) in &starts {
        match &start.standing {
            Standing::Open => verdict.stuck(id, "it was never answered"),
            Standing::Accepted => accepted(id, start, found, &mut verdict),
            Standing::Refused(code) => {
                if found.receipts.contains_key(id) || found.heads.contains_key(id) {
                    verdict.ghost(id, format!("it was refused ({code}), and it is there"));
                }
            }
        }
    }
    let ids: BTreeSet<&String> = found.receipts.keys().chain(found.heads.keys()).collect();
    for id in ids.into_iter().filter(|id| !starts.contains_key(*id)) {
        verdict.ghost(id, "it is there, and nobody has asked for it");
    }
    for (number, log) in &found.logs {
        if !found.heads.values().flatten().any(|head| head.workflow == *number) {
            verdict.wrong(&number.to_string(), format!("a log of {} events has no head", log.len()));
        }
    }
    for job in JOBS {
        (job.check)(ledger, found, &mut verdict);
    }
    verdict.lists_once();
    verdict
}

impl Verdict {
    /// Two jobs may have the same check.
    fn lists_once(&mut self) {
        for list in [&mut self.lost, &mut self.ghosts, &mut self.doubled, &mut self.stuck, &mut self.wrong] {
            list.sort();
            list.dedup();
        }
    }
}

fn accepted(id: &str, start: &Start, found: &Found, verdict: &mut Verdict) {
    let receipts = found.receipts.get(id).map_or(&[][..], Vec::as_slice);
    let heads = found.heads.get(id).map_or(&[][..], Vec::as_slice);
    if receipts.is_empty() {
        verdict.lost(id, "it was acknowledged, and has no receipt");
    }
    if heads.is_empty() {
        verdict.lost(id, "it was acknowledged, and is not there");
    }
    if receipts.len() > 1 || heads.len() > 1 {
        verdict.doubled(id, format!("it is there {} times, with {} receipts", heads.len(), receipts.len()));
    }
    let Some(head) = heads.first() else { return };
    if receipts.first().is_some_and(|number| *number != head.workflow) {
        verdict.wrong(id, "its receipt is another workflow's");
    }
    let log = found.log(head.workflow);
    match log.first() {
        Some(first) if is_content(first, &start.asked) => {}
        _ => verdict.lost(id, format!("it is not what was asked for: {:?}", log.first())),
    }
    order(id, head, log, verdict);
    steps(id, start, head, log, verdict);
}

/// Whether a log begins with what was asked for.
fn is_content(first: &Event, asked: &Asked) -> bool {
    let writes = &first.payload["writes"];
    first.kind == "workflow_created"
        && first.payload["name"] == asked.name
        && writes["input"] == asked.input
        && writes.get("mark").map(serde_json::Value::as_u64) == asked.mark.map(Some)
}

/// A log has no gaps, and one end, which is last.
fn order(id: &str, head: &Head, log: &[Event], verdict: &mut Verdict) {
    for (seq, event) in (0..).zip(log) {
        if event.seq != seq {
            return verdict.wrong(id, format!("its log has {} where {seq} should be", event.seq));
        }
    }
    let last = log.last().map_or(-1, |event| event.seq);
    if head.seq != last {
        verdict.wrong(id, format!("its head is at {} and its log at {last}", head.seq));
    }
    let ends: Vec<i64> =
        log.iter().filter(|event| ENDS.contains(&event.kind.as_str())).map(|event| event.seq).collect();
    match ends[..] {
        [] => verdict.stuck(id, format!("it is {} and has not ended", head.status)),
        [end] if end == last => {}
        [_] => verdict.wrong(id, "its log goes on after its end"),
        _ => verdict.doubled(id, format!("it has ended {} times", ends.len())),
    }
}

/// Each visit is committed once, and together they are what was asked for.
fn steps(id: &str, start: &Start, head: &Head, log: &[Event], verdict: &mut Verdict) {
    let (mut commits, mut failures, mut open) = (0, 0, None);
    let mut committed = BTreeSet::new();
    let mut handed_out = BTreeSet::new();
    let number = |event: &Event, field: &str| event.payload[field].as_u64().unwrap_or_default();
    for event in log {
        match event.kind.as_str() {
            "step_started" => {
                let visit = number(event, "visit");
                if let Some(open) = open.replace(visit) {
                    verdict.doubled(id, format!("visit {visit} began while {open} was open"));
                }
                if !handed_out.insert((visit, number(event, "attempt"), number(event, "delivery"))) {
                    verdict.doubled(id, format!("visit {visit} was handed out twice as the same delivery"));
                }
            }
            "step_completed" => {
                commits += 1;
                match open.take() {
                    Some(visit) if committed.insert(visit) => {}
                    Some(visit) => verdict.doubled(id, format!("visit {visit} was committed twice")),
                    None => verdict.doubled(id, format!("event {} commits a step that nobody held", event.seq)),
                }
            }
            "step_failed" => {
                open = None;
                let code = event.payload["code"].as_str().unwrap_or_default();
                if event.payload["counts"] == true {
                    failures += 1;
                } else if ["given_back", "lease_lost"].contains(&code) {
                    verdict.redelivered += 1;
                } else {
                    verdict.wrong(id, format!("a delivery ended with {code}"));
                }
            }
            _ => {}
        }
    }
    let expected = start.asked.expected();
    if commits > expected.commits {
        verdict.doubled(id, format!("{commits} steps committed where {} were asked for", expected.commits));
    }
    let cut_short = start.cancel.as_ref().is_some_and(|cancel| *cancel != Cancel::Open) && head.status == "cancelled";
    let is = Expected { commits, failures, status: expected.status, code: expected.code };
    if !cut_short && (is != expected || head.status != expected.status || head.code.as_deref() != expected.code) {
        let status = (&head.status, &head.code);
        verdict.wrong(id, format!("{is:?} {status:?} where {expected:?} was to be, of {:?}", start.asked));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn figures_are_one_line() {
        let mut verdict = Verdict::default();
        assert_eq!(verdict.to_string(), "lost 0 / ghost 0 / doubled 0 / stuck 0");
        verdict.lost("a", "gone");
        verdict.wrong("b", "odd");
        assert_eq!(verdict.to_string(), "lost 1 / ghost 0 / doubled 0 / stuck 0 / wrong 1");
        assert!(!verdict.is_clean());
    }

    #[test]
    fn an_unanswered_start_is_stuck_and_a_contradiction_is_wrong() {
        let ledger = Ledger::default();
        ledger.sent("a", &Asked::new("hello", json!({"steps": 1})));
        ledger.contradiction("b: it was new twice".to_owned());
        let verdict = judge(&ledger, &Found::default());
        assert_eq!((verdict.stuck.len(), verdict.wrong.len()), (1, 1));
    }
}
