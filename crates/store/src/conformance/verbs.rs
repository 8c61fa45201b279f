//! Verbs: what a line of a diary can say.
//!
//! One entry each: the word, its form, what it does, and, where random histories use it, how one is made up. A new
//! kind of command joins every scenario, every store's test and every random history by its entry in `VERBS`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::Arc;

use steadfast_core::claim::{Announced, CallId, Granted, Request, Steps, Terms};
use steadfast_core::command::{Command, Outcome};
use steadfast_core::commit::{self, After, Complete, Continuation, Fail, FailKind, When};
use steadfast_core::event::Event;
use steadfast_core::head::{Head, WorkerRef};
use steadfast_core::heartbeat::{self, Beat};
use steadfast_core::json::Json;
use steadfast_core::limits::Limits;
use steadfast_core::options::{Options, StartOptions};
use steadfast_core::retry::RetryPolicy;
use steadfast_core::signal::{self, Pending};
use steadfast_core::state::{State, Status};
use steadfast_core::text::{FailureCode, Key, Name, SignalId, SignalName, Step};
use steadfast_core::{admission, control, sweep};

use super::diary::{DAY_ONE, Diary, Words, ms, since};
use crate::clock::Clock;
use crate::contract::{Filter, Variable};
use crate::faults::Fault;

/// What a line of a diary can say.
pub(super) struct Verb {
    /// The word it begins with.
    pub(super) word: &'static str,
    /// How it is written.
    form: &'static str,
    /// What it does.
    pub(super) does: Does,
    /// How often random histories use it, and how one is made up.
    invent: Option<(u32, MakeUp)>,
}

/// Makes up a line.
type MakeUp = fn(&mut Dice<'_>) -> String;

/// What a verb does.
pub(super) enum Does {
    /// It is a command, or says why there is none to send.
    Command(fn(&mut Diary, &Words<'_>) -> Result<Command, String>),
    /// It is done at once and stands alone.
    Deed(fn(&mut Diary, &Words<'_>) -> String),
}

/// Every verb.
const VERBS: &[Verb] = &[
    Verb {
        word: "start",
        form: "start ID [name=] [input=JSON] [$KEY=JSON].. [priority=] [timeout=TIME] [attempts=] [claim=WORKER]",
        does: Does::Command(start),
        invent: Some((25, |dice| {
            let (id, input) = (dice.id(), dice.of(&[0, 0, 0, 1]));
            let name = dice.of(&["", "", "", "", " name=plain", " name=other"]);
            let options = dice.of(&["", "", "", "", " priority=3", " attempts=2", " attempts=1", " timeout=8s"]);
            let claim = dice.of(&["", " claim=a", " claim=b remote"]);
            format!("start {id} input={input}{name}{options}{claim}")
        })),
    },
    Verb {
        word: "claim",
        form: "claim WORKER [N] [remote] [lease=TIME] [knows=NAME:STEP|STEP,NAME:*-STEP] [request=] [in=NAMESPACE]",
        does: Does::Command(claim),
        invent: Some((20, |dice| {
            let worker = dice.of(&["a", "b", "c remote"]);
            let n = 1 + dice.below(3);
            let knows =
                dice.of(&["", "", "", "", "", " knows=flow:start|pay", " knows=flow:*-pay,plain:*", " knows=other:*"]);
            let request = if dice.below(3) == 1 { format!(" request=q{}", dice.below(3)) } else { String::new() };
            let lease = dice.of(&["", "", " lease=5s"]);
            let namespace = dice.of(&["", "", " in=blue"]);
            format!("claim {worker} {n}{knows}{request}{lease}{namespace}")
        })),
    },
    Verb {
        word: "complete",
        form: "complete CLAIM (to STEP [at=TIME | after=TIME] | wait NAME|NAME STEP [timeout=TIME STEP | until=TIME STEP] | \
               done JSON) [next=WORKER] [$KEY=JSON].. [-$KEY]..",
        does: Does::Command(complete),
        invent: Some((30, |dice| {
            let held = dice.held();
            let to = match dice.below(11) {
                0..5 => format!("to {}", dice.of(&["pay", "ship", "start"])),
                5..7 => format!("to pay {}", dice.of(&["after=10s", "after=500ms", "at=30s"])),
                7..10 => {
                    let names = dice.of(&["paid", "paid", "void", "paid|void", "void|late|paid"]);
                    let over = dice.of(&["", "", " timeout=3s remind", " timeout=30s ship", " until=10s remind"]);
                    format!("wait {names} {}{over}", dice.of(&["ship", "pay"]))
                }
                _ => format!("done {}", dice.below(2)),
            };
            let writes = dice.of(&["", "", " $user=1", " -$user $old=2", " $old=null -$user", " $user=[1.0]"]);
            let next = dice.of(&["", " next=a", " next=b"]);
            format!("complete {held} {to}{writes}{next}")
        })),
    },
    Verb {
        word: "fail",
        form: "fail CLAIM CODE [final] [after=TIME] [attempts=]",
        does: Does::Command(fail),
        invent: Some((12, |dice| {
            let held = dice.held();
            let how = dice.of(&["", "", "", " after=0s", " after=3s", " final", " attempts=1"]);
            format!("fail {held} {}{how}", dice.of(&["boom", "bang"]))
        })),
    },
    Verb {
        word: "return",
        form: "return CLAIM",
        does: Does::Command(hand_back),
        invent: Some((4, |dice| format!("return {}", dice.held()))),
    },
    Verb {
        word: "beat",
        form: "beat CLAIM.. [progress=JSON]",
        does: Does::Command(beat),
        invent: Some((8, |dice| {
            let progress = dice.of(&["", " progress=1", " progress=null"]);
            format!("beat {} {}{progress}", dice.held(), dice.held())
        })),
    },
    Verb {
        word: "cancel",
        form: "cancel ID",
        does: Does::Command(cancel),
        invent: Some((5, |dice| format!("cancel {}", dice.id()))),
    },
    Verb {
        word: "signal",
        form: "signal ID NAME [as=SIGNAL_ID] [payload=JSON]: it is called s1, s2, .. unless it is said otherwise",
        does: Does::Command(signal),
        invent: Some((14, |dice| {
            let (id, name) = (dice.id(), dice.of(&["paid", "paid", "void", "late"]));
            let called = dice.of(&["", "", "", " as=a", " as=b"]);
            format!("signal {id} {name}{called} payload={}", dice.of(&[0, 0, 0, 1]))
        })),
    },
    Verb {
        word: "sweep",
        form: "sweep [limit=] [deliveries=]",
        does: Does::Command(sweep),
        invent: Some((12, |dice| {
            let limit = 1 + dice.below(4);
            format!("sweep limit={limit}{}", dice.of(&["", "", " deliveries=2"]))
        })),
    },
    Verb {
        word: "give_back",
        form: "give_back [limit=] [orphaned] [on]: from the first claim, or on from where the last page ended",
        does: Does::Command(give_back),
        invent: Some((5, |dice| {
            let limit = 1 + dice.below(4);
            format!("give_back limit={limit}{}", dice.of(&["", " on", " orphaned"]))
        })),
    },
    Verb {
        word: "again",
        form: "again: sends the last batch once more, with the same ids, tokens and seeds",
        does: Does::Deed(|diary, _| {
            let last = diary.last.clone();
            diary.run(last.into_iter().map(Ok).collect()).join(" | ")
        }),
        invent: Some((10, |_| "again".to_owned())),
    },
    Verb {
        word: "at",
        form: "at TIME: it is that long since the diary began",
        does: Does::Deed(|diary, words| {
            let wanted = DAY_ONE + ms(words.plain(0));
            assert!(wanted >= diary.now(), "a diary does not go back in time");
            diary.clock.at_least(wanted);
            String::new()
        }),
        invent: None,
    },
    Verb {
        word: "pass",
        form: "pass TIME",
        does: Does::Deed(|diary, words| {
            diary.clock.advance(ms(words.plain(0)));
            String::new()
        }),
        invent: Some((15, |dice| {
            let short = dice.of(&["1ms", "500ms", "1s", "3s", "5s", "10s", "30s"]);
            format!("pass {}", if dice.below(12) == 11 { dice.of(&["10m", "25h"]) } else { short })
        })),
    },
    Verb {
        word: "reopen",
        form: "reopen: the owner goes, another takes the store over",
        does: Does::Deed(|diary, _| {
            diary.reopen(false);
            String::new()
        }),
        invent: Some((2, |_| "reopen".to_owned())),
    },
    Verb {
        word: "restore",
        form: "restore: the owner goes, another opens a backup made at that moment",
        does: Does::Deed(|diary, _| {
            diary.reopen(true);
            String::new()
        }),
        invent: Some((1, |_| "restore".to_owned())),
    },
    Verb {
        word: "fault",
        form: "fault (load | not_committed | unknown_written | unknown_not_written | sync | pass): at the next batch",
        does: Does::Deed(|diary, words| {
            diary.plan().add([match words.plain(0) {
                "load" => Fault::Load,
                "not_committed" => Fault::NotCommitted,
                "unknown_written" => Fault::UnknownWritten,
                "unknown_not_written" => Fault::UnknownNotWritten,
                "sync" => Fault::Sync,
                "pass" => Fault::Pass,
                other => panic!("no fault is called {other}"),
            }]);
            String::new()
        }),
        invent: Some((6, |dice| {
            format!("fault {}", dice.of(&["load", "not_committed", "unknown_written", "unknown_not_written", "sync"]))
        })),
    },
    Verb {
        word: "owner",
        form: "owner",
        does: Does::Deed(|diary, _| {
            let identity = diary.identity();
            format!("boot {} epoch {}", identity.boot, identity.epoch)
        }),
        invent: None,
    },
    Verb { word: "head", form: "head ID", does: Does::Deed(head), invent: None },
    Verb { word: "log", form: "log ID [from=SEQ] [limit=]", does: Does::Deed(log), invent: None },
    Verb { word: "get", form: "get ID KEY", does: Does::Deed(get), invent: None },
    Verb { word: "vars", form: "vars ID [after=KEY] [limit=]", does: Does::Deed(vars), invent: None },
    Verb { word: "inbox", form: "inbox ID [after=NUMBER] [limit=]", does: Does::Deed(inbox), invent: None },
    Verb { word: "receipt", form: "receipt ID", does: Does::Deed(receipt), invent: None },
    Verb {
        word: "list",
        form: "list [in=NAMESPACE] [name=] [status=] [page=]: all pages, newest first",
        does: Does::Deed(list),
        invent: None,
    },
    Verb {
        word: "next_due",
        form: "next_due",
        does: Does::Deed(|diary, _| match diary.reader().next_due() {
            Ok(due) => due.map_or("-".to_owned(), since),
            Err(error) => panic!("{error}"),
        }),
        invent: None,
    },
    Verb {
        word: "mark",
        form: "mark: remembers the whole content of the store",
        does: Does::Deed(|diary, _| {
            diary.marked = diary.dump();
            String::new()
        }),
        invent: None,
    },
    Verb {
        word: "unchanged",
        form: "unchanged: whether the content is that of the last mark",
        does: Does::Deed(|diary, _| {
            let now = diary.dump();
            if now == diary.marked {
                return "yes".to_owned();
            }
            let before: BTreeSet<&str> = diary.marked.lines().collect();
            let after: BTreeSet<&str> = now.lines().collect();
            format!("no: {:?}", before.symmetric_difference(&after).collect::<Vec<_>>())
        }),
        invent: None,
    },
    Verb {
        word: "commits",
        form: "commits: how many batches wrote something since the last time this was asked",
        does: Does::Deed(|diary, _| std::mem::take(&mut diary.commits).to_string()),
        invent: None,
    },
    Verb { word: "verify", form: "verify", does: Does::Deed(verify), invent: None },
];

pub(super) fn find(word: &str) -> &'static Verb {
    VERBS.iter().find(|verb| verb.word == word).unwrap_or_else(|| {
        let forms: Vec<&str> = VERBS.iter().map(|verb| verb.form).collect();
        panic!("no verb is called {word:?}; there are\n  {}", forms.join("\n  "))
    })
}

/// Choices made elsewhere, at random or while a failing history is made smaller; without any left, always the first.
#[derive(Debug)]
pub struct Dice<'a> {
    thrown: &'a [u16],
}

impl<'a> Dice<'a> {
    /// Takes its choices from `thrown`.
    pub fn new(thrown: &'a [u16]) -> Self {
        Self { thrown }
    }

    fn below(&mut self, n: u32) -> u32 {
        let Some((first, rest)) = self.thrown.split_first() else { return 0 };
        self.thrown = rest;
        u32::from(*first) % n
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(u32::try_from(choices.len()).expect("few choices")) as usize]
    }

    fn id(&mut self) -> &'static str {
        self.of(&["w1", "w2", "w3", "w4", "w5", "w6", "w7", "w8", "blue/w1", "blue/w2"])
    }

    fn held(&mut self) -> String {
        match self.below(12) {
            0..6 => "@open".to_owned(),
            6 => "@last".to_owned(),
            7 => "@prev".to_owned(),
            8 => "@open!".to_owned(),
            _ => format!("{}@{}", self.id(), self.of(&["last", "prev", "1", "3"])),
        }
    }
}

/// Makes up one line of a random history. The first choice says which verb; `+` joins the line to the one before
/// where both are commands, and is left to the caller.
pub fn invent(dice: &mut Dice<'_>) -> String {
    let made_up = || VERBS.iter().filter_map(|verb| verb.invent);
    let mut choice = dice.below(made_up().map(|(weight, _)| weight).sum());
    for (weight, make_up) in made_up() {
        match choice.checked_sub(weight) {
            None => return make_up(dice),
            Some(rest) => choice = rest,
        }
    }
    unreachable!("the choice is below the sum of the weights")
}

/// True when lines like this one can share a batch.
pub fn is_command(line: &str) -> bool {
    matches!(find(line.split(' ').next().unwrap_or_default()).does, Does::Command(_))
}

// ---- commands ----

/// What a definition runs by: `plain` by the defaults, every other by delays without jitter, so that a diary can
/// name the instant of a retry.
fn definition(name: &str) -> Options {
    match name {
        "plain" => Options::default(),
        _ => Options { retry: RetryPolicy { jitter_percent: 0, ..RetryPolicy::default() }, ..Options::default() },
    }
}

fn start(diary: &mut Diary, words: &Words<'_>) -> Result<Command, String> {
    let name = words.named("name").unwrap_or("flow");
    let definition = definition(name);
    let options = StartOptions {
        retry: words.number("attempts").map(|attempts_max| RetryPolicy { attempts_max, ..definition.retry.clone() }),
        step_timeout_ms: words.ms("timeout").map(i64::unsigned_abs),
        priority: words.number("priority"),
        tags: Vec::new(),
    };
    let asked = admission::Asked {
        key: diary.key(words.plain(0)),
        name: Name::trusted(name),
        input: words.json("input").unwrap_or_else(Json::null),
        writes: words.writes.clone(),
        options,
    };
    let checked = asked.check(&definition, &diary.identity().fingerprint_key, &Limits::default());
    let mut start = checked.map_err(|invalid| invalid.code.to_owned())?;
    if let Some(worker) = words.named("claim") {
        let mut terms = terms(diary, worker, words);
        Arc::make_mut(&mut terms.announced).namespace = start.key.namespace.clone();
        start.claim = Some(terms);
    }
    Ok(Command::Start(Box::new(start)))
}

/// The terms of a worker that knows everything, unless it is said otherwise.
fn terms(diary: &mut Diary, worker: &str, words: &Words<'_>) -> Terms {
    let mut definitions = BTreeMap::new();
    for definition in words.named("knows").unwrap_or("flow:*,plain:*").split(',') {
        let (name, steps) = definition.split_once(':').unwrap_or_else(|| panic!("not NAME:STEPS: {definition}"));
        let set = |list: &str| list.split('|').filter(|step| !step.is_empty()).map(Step::trusted).collect();
        let steps = match steps.strip_prefix('*') {
            Some(unknown) => Steps::AllBut(set(unknown.trim_start_matches('-'))),
            None => Steps::Listed(set(steps)),
        };
        definitions.insert(Name::trusted(name), steps);
    }
    let boot = diary.identity().boot;
    Terms {
        worker: WorkerRef { label: worker.into(), boot, remote: words.has("remote") },
        announced: Arc::new(Announced {
            namespace: diary.namespace(words.named("in").unwrap_or("default")),
            definitions,
        }),
        lease_ms: words.ms("lease").unwrap_or(30_000).unsigned_abs(),
        seed: diary.seed(),
    }
}

fn claim(diary: &mut Diary, words: &Words<'_>) -> Result<Command, String> {
    let n = words.all().iter().find_map(|word| word.parse().ok()).unwrap_or(1);
    let id = words.named("request").map(|id| CallId(id.into()));
    Ok(Command::Claim(Request { terms: terms(diary, words.plain(0), words), n, id }))
}

fn complete(diary: &mut Diary, words: &Words<'_>) -> Result<Command, String> {
    let held = diary.held(words.plain(0))?;
    let continuation = match words.plain(1) {
        "to" => Continuation::Step {
            step: Step::trusted(words.plain(2)),
            when: match (words.ms("at"), words.ms("after")) {
                (Some(at), _) => When::At(DAY_ONE + at),
                (_, Some(after)) => When::After(after.unsigned_abs()),
                _ => When::Now,
            },
        },
        "wait" => Continuation::Wait {
            signals: words.plain(2).split('|').map(SignalName::trusted).collect(),
            then: Step::trusted(words.plain(3)),
            timeout: match (words.ms("until"), words.ms("timeout")) {
                (Some(at), _) => Some((When::At(DAY_ONE + at), Step::trusted(words.plain(4)))),
                (_, Some(after)) => Some((When::After(after.unsigned_abs()), Step::trusted(words.plain(4)))),
                _ => None,
            },
        },
        "done" => Continuation::Done(Json::parse(words.plain(2)).map_err(|error| error.code().to_owned())?),
        other => panic!("a step leads to a step, waits or is done, not {other}"),
    };
    let claim_next = words.named("next").map(|worker| {
        let mut terms = terms(diary, worker, words);
        Arc::make_mut(&mut terms.announced).namespace = held.key.namespace.clone();
        terms
    });
    Ok(Command::Complete(Box::new(Complete { held, writes: words.writes.clone(), continuation, claim_next })))
}

fn fail(diary: &mut Diary, words: &Words<'_>) -> Result<Command, String> {
    let kind =
        FailKind::Error { retryable: !words.has("final"), retry_after_ms: words.ms("after").map(i64::unsigned_abs) };
    let retry = words.number("attempts").map(|attempts_max| RetryPolicy { attempts_max, ..definition("flow").retry });
    end_attempt(diary, words, kind, words.plain(1), retry)
}

fn hand_back(diary: &mut Diary, words: &Words<'_>) -> Result<Command, String> {
    end_attempt(diary, words, FailKind::GivenBack, "given_back", None)
}

fn end_attempt(
    diary: &mut Diary,
    words: &Words<'_>,
    kind: FailKind,
    code: &str,
    retry: Option<RetryPolicy>,
) -> Result<Command, String> {
    Ok(Command::Fail(Box::new(Fail {
        held: diary.held(words.plain(0))?,
        kind,
        code: FailureCode::trusted(code),
        reason: "it broke".to_owned(),
        retry,
        jitter: jitter(diary),
        deliveries_max: deliveries_max(words),
    })))
}

/// Spread over the whole range, the same on every store.
fn jitter(diary: &mut Diary) -> u32 {
    u32::try_from(diary.draw()).expect("a diary is short").wrapping_mul(2_654_435_769)
}

fn deliveries_max(words: &Words<'_>) -> u32 {
    words.number("deliveries").unwrap_or(Limits::default().deliveries_max)
}

fn beat(diary: &mut Diary, words: &Words<'_>) -> Result<Command, String> {
    let progress = words.json("progress");
    let held: Vec<_> = words.all().iter().filter_map(|word| diary.held(word).ok()).collect();
    if held.is_empty() {
        return Err("no such claim".to_owned());
    }
    let beats = held.into_iter().map(|held| Beat { held, progress: progress.clone() }).collect();
    Ok(Command::Heartbeat(heartbeat::Request { beats }))
}

fn cancel(diary: &mut Diary, words: &Words<'_>) -> Result<Command, String> {
    let key = diary.key(words.plain(0));
    Ok(Command::Cancel(control::Cancel { key, reason: "no longer needed".to_owned(), by: "ops".to_owned() }))
}

fn signal(diary: &mut Diary, words: &Words<'_>) -> Result<Command, String> {
    let key = diary.key(words.plain(0));
    let id = match words.named("as") {
        Some(id) => id.to_owned(),
        None => diary.next_signal(),
    };
    let asked = signal::Asked {
        key,
        name: SignalName::trusted(words.plain(1)),
        id: SignalId::trusted(id),
        payload: words.json("payload").unwrap_or_else(Json::null),
    };
    let checked = asked.check(&diary.identity().fingerprint_key, &Limits::default());
    Ok(Command::Signal(Box::new(checked.map_err(|invalid| invalid.code.to_owned())?)))
}

fn sweep(diary: &mut Diary, words: &Words<'_>) -> Result<Command, String> {
    let limit = words.number("limit").unwrap_or(100);
    Ok(Command::Sweep(sweep::Sweep { limit, jitter: jitter(diary), deliveries_max: deliveries_max(words) }))
}

fn give_back(diary: &mut Diary, words: &Words<'_>) -> Result<Command, String> {
    Ok(Command::GiveBack(sweep::GiveBack {
        boots: diary.store().boots().expect("the boots are looked up"),
        orphaned: if words.has("orphaned") { diary.orphaned.clone() } else { Vec::new() },
        after: if words.has("on") { diary.given_back_to.clone() } else { None },
        limit: words.number("limit").unwrap_or(100),
        deliveries_max: deliveries_max(words),
    }))
}

// ---- outcomes ----

pub(super) fn tell_outcome(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Start(admission::Outcome::Started { claimed: None }) => "started".to_owned(),
        Outcome::Start(admission::Outcome::Started { claimed: Some(granted) }) => format!("started {}", tell(granted)),
        Outcome::Start(admission::Outcome::Replay { admitted_at }) => format!("replay of {}", since(*admitted_at)),
        Outcome::Start(admission::Outcome::IdentityConflict { admitted_at }) => {
            format!("identity_conflict with {}", since(*admitted_at))
        }
        Outcome::Claim(page) if page.granted.is_empty() => "-".to_owned(),
        Outcome::Claim(page) => page.granted.iter().map(tell).collect::<Vec<_>>().join(", "),
        Outcome::Commit(commit::Outcome::Committed(after)) => format!("committed {}", tell_after(after)),
        Outcome::Commit(commit::Outcome::AlreadyCommitted(after)) => format!("already_committed {}", tell_after(after)),
        Outcome::Commit(commit::Outcome::Lost) => "lost".to_owned(),
        Outcome::Heartbeat(answers) => {
            let tell = |answer: &heartbeat::Answer| match answer {
                heartbeat::Answer::Held { lease_until } => format!("until {}", since(*lease_until)),
                heartbeat::Answer::Lost => "lost".to_owned(),
            };
            answers.iter().map(tell).collect::<Vec<_>>().join(", ")
        }
        Outcome::Cancel(control::Outcome::Cancelled) => "cancelled".to_owned(),
        Outcome::Cancel(control::Outcome::AlreadyFinished { status }) => format!("already {}", status.label()),
        Outcome::Cancel(control::Outcome::Unknown) => "unknown id".to_owned(),
        Outcome::Signal(signal::Outcome::Accepted { taken: true }) => "accepted, taken".to_owned(),
        Outcome::Signal(signal::Outcome::Accepted { taken: false }) => "accepted".to_owned(),
        Outcome::Signal(signal::Outcome::Replay { accepted_at }) => format!("replay of {}", since(*accepted_at)),
        Outcome::Signal(signal::Outcome::IdentityConflict { accepted_at }) => {
            format!("identity_conflict with {}", since(*accepted_at))
        }
        Outcome::Signal(signal::Outcome::Finished { status }) => format!("already {}", status.label()),
        Outcome::Signal(signal::Outcome::Unknown) => "unknown id".to_owned(),
        Outcome::Sweep(report) => tell_report(report),
    }
}

fn tell(granted: &Granted) -> String {
    let mut text = format!("{}@{}:{}", name_of(&granted.held.key), granted.held.seq, granted.step);
    if granted.attempt != 1 {
        let _ = write!(text, " attempt {}", granted.attempt);
    }
    if granted.delivery != 1 {
        let _ = write!(text, " delivery {}", granted.delivery);
    }
    text
}

fn name_of(key: &steadfast_core::text::WorkflowKey) -> String {
    if key.namespace.as_str() == "default" { key.id.to_string() } else { format!("{}/{}", key.namespace, key.id) }
}

fn tell_after(after: &After) -> String {
    let mut text = after.status.label().to_owned();
    if let Some(next) = &after.next {
        let _ = write!(text, " {}", tell(next));
    }
    text
}

fn tell_report(report: &sweep::Report) -> String {
    let counts = [
        ("woken", report.woken),
        ("waits over", report.waits_over),
        ("leases lost", report.leases_lost),
        ("timed out", report.timed_out),
        ("given back", report.given_back),
        ("alive", report.alive),
        ("skipped", report.skipped),
    ];
    let mut parts: Vec<String> = counts.iter().filter(|(_, n)| *n > 0).map(|(what, n)| format!("{n} {what}")).collect();
    if report.more {
        parts.push("more".to_owned());
    }
    if parts.is_empty() { "-".to_owned() } else { parts.join(", ") }
}

// ---- looks ----

fn head(diary: &mut Diary, words: &Words<'_>) -> String {
    let key = diary.key(words.plain(0));
    match diary.reader().head(&key) {
        Ok(Some(head)) => tell_head(&head),
        Ok(None) => "-".to_owned(),
        Err(error) => panic!("{error}"),
    }
}

/// A head in words: status, visit in progress, and what it waits for.
pub(super) fn tell_head(head: &Head) -> String {
    let mut text = head.status().label().to_owned();
    if let Some(visit) = head.visit() {
        let _ = write!(text, " {}", visit.step);
        for (what, n) in [("attempt", visit.attempt), ("delivery", visit.delivery)] {
            if n != 1 {
                let _ = write!(text, " {what} {n}");
            }
        }
    }
    match (&head.state, &head.claim) {
        (State::Ready { since: at, .. }, _) => {
            let _ = write!(text, " since {}", since(*at));
            let rank = head.placed().rank.expect("a ready head has a rank");
            if rank != *at {
                let _ = write!(text, " rank {}", since(rank));
            }
        }
        (State::Sleeping { until, .. } | State::Backoff { until, .. }, _) => {
            let _ = write!(text, " until {}", since(*until));
        }
        (State::Waiting { wait, .. }, _) => {
            let names: Vec<&str> = wait.signals.iter().map(SignalName::as_str).collect();
            let _ = write!(text, " for {}", names.join("|"));
            if let Some(timeout) = &wait.timeout {
                let _ = write!(text, " until {} else {}", since(timeout.at), timeout.then);
            }
        }
        (State::Running { .. }, Some(claim)) => {
            let _ = write!(text, " by {} until {}", claim.worker.label, since(claim.lease_until));
            if let Some(progress) = &claim.progress {
                let _ = write!(text, " progress {progress}");
            }
        }
        (State::Failed { code }, _) => {
            let _ = write!(text, " {code}");
        }
        _ => {}
    }
    text
}

fn log(diary: &mut Diary, words: &Words<'_>) -> String {
    let key = diary.key(words.plain(0));
    let from = words.number("from").unwrap_or(0);
    let events = diary.reader().events(&key, from, words.number("limit").unwrap_or(1_000)).expect("the log is read");
    if events.is_empty() {
        return "-".to_owned();
    }
    let tell = |event: &Event| match event {
        Event::StepFailed { code, retry_at, counts, .. } => {
            let mut text = format!("step_failed {code}");
            if !counts {
                text += " uncounted";
            }
            if let Some(at) = retry_at {
                let _ = write!(text, " retry at {}", since(*at));
            }
            text
        }
        Event::WorkflowFailed { code, .. } => format!("workflow_failed {code}"),
        Event::SignalReceived { name, .. } => format!("signal_received {name}"),
        Event::WorkflowCompleted { result } => format!("workflow_completed {result}"),
        event => event.kind().to_owned(),
    };
    let first = events[0].seq;
    let told: Vec<String> = events.iter().map(|logged| tell(&logged.event)).collect();
    if first == 0 { told.join(", ") } else { format!("{first}: {}", told.join(", ")) }
}

fn tell_variable(variable: &Variable) -> String {
    format!("{}={}@{}", variable.key, variable.value, variable.seq)
}

fn get(diary: &mut Diary, words: &Words<'_>) -> String {
    let key = diary.key(words.plain(0));
    let found = diary.reader().variable(&key, &Key::trusted(words.plain(1))).expect("the variable is read");
    found.map_or("-".to_owned(), |variable| format!("{}@{}", variable.value, variable.seq))
}

fn vars(diary: &mut Diary, words: &Words<'_>) -> String {
    let key = diary.key(words.plain(0));
    let after = words.named("after").map(Key::trusted);
    let limit = words.number("limit").unwrap_or(1_000);
    let found = diary.reader().variables(&key, after.as_ref(), limit).expect("the scratchpad is read");
    let told: Vec<String> = found.iter().map(tell_variable).collect();
    if told.is_empty() { "-".to_owned() } else { told.join(" ") }
}

fn inbox(diary: &mut Diary, words: &Words<'_>) -> String {
    let key = diary.key(words.plain(0));
    let (after, limit) = (words.number("after").unwrap_or(0), words.number("limit").unwrap_or(1_000));
    let found = diary.reader().signals(&key, after, limit).expect("the inbox is read");
    let tell = |pending: &Pending| format!("{} {} {} {}", pending.number, pending.name, pending.id, pending.payload);
    let told: Vec<String> = found.iter().map(tell).collect();
    if told.is_empty() { "-".to_owned() } else { told.join(", ") }
}

fn receipt(diary: &mut Diary, words: &Words<'_>) -> String {
    let key = diary.key(words.plain(0));
    let found = diary.reader().admission(&key).expect("the receipt is read");
    found.map_or("-".to_owned(), |receipt| format!("admitted at {}", since(receipt.admitted_at)))
}

fn list(diary: &mut Diary, words: &Words<'_>) -> String {
    let filter = Filter {
        namespace: diary.namespace(words.named("in").unwrap_or("default")),
        name: words.named("name").map(Name::trusted),
        status: words.named("status").map(|word| Status::from_label(word).expect("a status word")),
    };
    let limit = words.number("page").unwrap_or(2);
    let (mut told, mut before) = (Vec::new(), None);
    loop {
        let page = diary.reader().list(&filter, before, limit).expect("the list is read");
        assert!(page.items.len() <= limit, "a page holds no more than was asked for");
        told.extend(page.items.iter().map(|listed| listed.head.key.id.to_string()));
        if let (Some(cursor), Some(last)) = (page.next, page.items.last()) {
            assert!(cursor <= last.cursor, "the next page begins behind this one");
        }
        before = page.next;
        if before.is_none() {
            break;
        }
    }
    if told.is_empty() { "-".to_owned() } else { told.join(" ") }
}

fn verify(diary: &mut Diary, _: &Words<'_>) -> String {
    let verified = diary.reader().verify(&mut |_| {}).expect("the store can be read");
    if verified.fault_count == 0 {
        return "clean".to_owned();
    }
    let told: Vec<String> = verified
        .faults
        .iter()
        .map(|fault| format!("{} {}: {}", fault.code, name_of(&fault.key), fault.detail))
        .collect();
    told.join("; ")
}
