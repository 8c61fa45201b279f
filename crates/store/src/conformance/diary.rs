//! Diary: a scenario as lines.
//!
//! A line is a command, two spaces or more, and what comes of it. A line that begins with `+` is decided in the same
//! batch as the line before. Times are counted from the beginning of the diary. The verbs and what they say are in
//! [`verbs`](super::verbs).
//!
//! ```text
//! start w1                      started
//! claim a                       w1@1:start
//! at 5s
//! complete w1@1 to pay          committed ready
//! + claim b                     w1@3:pay
//! ```
//!
//! `w1@1` is the claim that wrote event 1 of `w1`; `w1@last` the last one handed out of `w1`, `@last` the last one of
//! all, `@prev` the one before, `@open` the last one that is still open, and `w1@1!` a claim under a forged token.
//! `blue/w1` is `w1` of namespace `blue`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write as _};
use std::sync::Arc;

use steadfast_core::claim::Held;
use steadfast_core::command::{Command, Moment, Outcome};
use steadfast_core::commit;
use steadfast_core::event::Writes;
use steadfast_core::head::Token;
use steadfast_core::json::Json;
use steadfast_core::text::{Key, Namespace, WorkflowId, WorkflowKey};

use super::verbs::{self, Does};
use super::{Applied, Harness, apply, dump, laws};
use crate::clock::{Clock, ManualClock};
use crate::contract::{Identity, Reader, Store, StoreError, Writer};
use crate::faults::{Faulty, Plan};

/// The instant at which every diary begins, in milliseconds since the epoch.
pub const DAY_ONE: i64 = 1_800_000_000_000;

/// A scenario under way on one store.
pub struct Diary {
    harness: Box<dyn Harness>,
    pub(super) clock: Arc<ManualClock>,
    open: Option<Open>,
    /// Claims handed out, in order.
    claims: Vec<Held>,
    /// Counts the commands that need randomness; it stands in for it, so that every store sees the same.
    drawn: u64,
    /// How many signals were sent without a name of their own.
    signals: u64,
    /// The last batch, for sending it again.
    pub(super) last: Vec<Command>,
    /// Seeds of claims whose outcome nobody heard.
    pub(super) orphaned: Vec<[u8; 32]>,
    /// Where the last page of giving back ended.
    pub(super) given_back_to: Option<steadfast_core::snapshot::ClaimCursor>,
    /// Batches that wrote something.
    pub(super) commits: usize,
    /// The store's content at the last `mark`.
    pub(super) marked: String,
    namespaces: BTreeSet<Namespace>,
}

/// The store while one owner has it. The writer goes first, then the store: fields are dropped in order.
struct Open {
    writer: Box<dyn Writer>,
    plan: Plan,
    store: Faulty<Box<dyn Store>>,
}

impl fmt::Debug for Diary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Diary").field("now", &self.now()).field("claims", &self.claims).finish_non_exhaustive()
    }
}

impl Diary {
    /// Opens an empty store.
    pub fn begin(harness: Box<dyn Harness>) -> Self {
        let mut diary = Self {
            harness,
            clock: Arc::new(ManualClock::new(DAY_ONE)),
            open: None,
            claims: Vec::new(),
            drawn: 0,
            signals: 0,
            last: Vec::new(),
            orphaned: Vec::new(),
            given_back_to: None,
            commits: 0,
            marked: String::new(),
            namespaces: [Namespace::default_namespace()].into(),
        };
        diary.reopen(false);
        diary
    }

    /// Tells a page.
    ///
    /// # Panics
    /// If anything comes out otherwise than the last column says; the message is the page as it really went.
    #[track_caller]
    pub fn tell(&mut self, page: &str) {
        let entries: Vec<(&str, &str)> = page
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty())
            .map(|line| line.split_once("  ").map_or((line, ""), |(line, expected)| (line, expected.trim())))
            .collect();
        let lines: Vec<&str> = entries.iter().map(|(line, _)| *line).collect();
        let answers = self.say_all(&lines);
        if answers.iter().zip(&entries).all(|(answer, (_, expected))| answer == expected) {
            return;
        }
        let mut went = String::new();
        for (answer, (line, expected)) in answers.iter().zip(&entries) {
            let _ = write!(went, "\n  {line:<40}  {answer}");
            if answer != expected {
                let _ = write!(went, "      <-- expected: {expected}");
            }
        }
        panic!("the diary went otherwise:{went}");
    }

    /// Says one line and hears what comes of it.
    pub fn say(&mut self, line: &str) -> String {
        self.say_all(&[line]).pop().expect("a line has an answer")
    }

    /// Says lines, those with a `+` in the batch of the line before, and hears what comes of each.
    ///
    /// # Panics
    /// If a line cannot be read.
    pub fn say_all(&mut self, lines: &[impl AsRef<str>]) -> Vec<String> {
        let mut answers = Vec::with_capacity(lines.len());
        let mut at = 0;
        while at < lines.len() {
            let mut end = at + 1;
            while end < lines.len() && lines[end].as_ref().starts_with('+') {
                end += 1;
            }
            answers.extend(self.batch(&lines[at..end]));
            at = end;
        }
        answers
    }

    /// Says lines that stand in one batch.
    fn batch(&mut self, lines: &[impl AsRef<str>]) -> Vec<String> {
        let mut commands: Vec<Result<Command, String>> = Vec::with_capacity(lines.len());
        for line in lines {
            let line = line.as_ref();
            let words = Words::read(line.trim_start_matches('+').trim_start());
            match verbs::find(words.verb).does {
                Does::Command(build) => commands.push(build(self, &words)),
                Does::Deed(run) if lines.len() == 1 => return vec![run(self, &words)],
                Does::Deed(_) => panic!("this cannot stand in a batch: {line}"),
            }
        }
        self.run(commands)
    }

    /// Runs one batch and puts every outcome into words.
    pub(super) fn run(&mut self, commands: Vec<Result<Command, String>>) -> Vec<String> {
        let ready: Vec<Command> = commands.iter().filter_map(|command| command.clone().ok()).collect();
        if ready.is_empty() {
            return commands.into_iter().filter_map(Result::err).collect();
        }
        let open = self.open.as_mut().expect("a store is open");
        let moment = Moment { now: self.clock.now(), epoch: open.writer.epoch() };
        let applied = apply(open.writer.as_mut(), &moment, &ready);
        let said = match applied {
            Applied::Committed(outcomes) => {
                self.commits += 1;
                Ok(outcomes)
            }
            Applied::Unchanged(outcomes) => Ok(outcomes),
            Applied::NotCommitted(StoreError::Injected(_)) => Err("not committed"),
            Applied::NotCommitted(error) => panic!("{error}: {error:?}"),
            Applied::Unknown(StoreError::Injected(_)) => {
                open.writer.recover().expect("a store recovers");
                self.orphaned = ready.iter().filter_map(orphaned_seed).collect();
                Err("unknown")
            }
            Applied::Unknown(error) => panic!("{error}: {error:?}"),
        };
        self.last = ready;
        let mut outcomes = match said {
            Ok(outcomes) => outcomes.into_iter(),
            Err(word) => return commands.into_iter().map(|command| command.err().unwrap_or(word.to_owned())).collect(),
        };
        let mut answers = Vec::with_capacity(commands.len());
        for command in commands {
            answers.push(match command {
                Err(why) => why,
                Ok(_) => {
                    let outcome = outcomes.next().expect("every command has an outcome");
                    self.hear(&outcome);
                    verbs::tell_outcome(&outcome)
                }
            });
        }
        answers
    }

    /// Keeps what was handed out.
    fn hear(&mut self, outcome: &Outcome) {
        let granted: Vec<Held> = match outcome {
            Outcome::Start(steadfast_core::admission::Outcome::Started { claimed }) => {
                claimed.iter().map(|granted| granted.held.clone()).collect()
            }
            Outcome::Claim(page) => page.granted.iter().map(|granted| granted.held.clone()).collect(),
            Outcome::Commit(commit::Outcome::Committed(after) | commit::Outcome::AlreadyCommitted(after)) => {
                after.next.iter().map(|granted| granted.held.clone()).collect()
            }
            Outcome::Sweep(report) if report.after.is_some() => {
                self.given_back_to = report.after.clone();
                Vec::new()
            }
            _ => Vec::new(),
        };
        for held in granted {
            // A claim that is heard of once more stays where it was.
            if !self.claims.iter().rev().any(|known| *known == held) {
                self.claims.push(held);
            }
        }
    }

    /// Ends the diary: the store verifies clean and its logs obey the laws.
    ///
    /// # Panics
    /// If not.
    pub fn end(mut self) {
        assert_eq!(self.say("verify"), "clean");
        let reader = self.reader();
        let broken = laws(&*reader, &self.namespaces).expect("the store can be read");
        assert!(broken.is_empty(), "laws are broken:\n{}\n{}", broken.join("\n"), self.dump());
    }

    /// The whole content that readers can see, as text.
    pub fn dump(&self) -> String {
        dump(&*self.reader(), &self.namespaces).expect("the store can be read")
    }

    /// Lets the present owner go and opens the store under a new one.
    pub(super) fn reopen(&mut self, restored: bool) {
        self.open = None;
        let store = Faulty::new(self.harness.open(self.clock.clone(), restored));
        let writer = store.writer().expect("a fresh store has its writer");
        self.open = Some(Open { writer, plan: store.plan(), store });
        self.given_back_to = None;
    }

    pub(super) fn store(&self) -> &dyn Store {
        &self.open.as_ref().expect("a store is open").store
    }

    pub(super) fn plan(&self) -> &Plan {
        &self.open.as_ref().expect("a store is open").plan
    }

    pub(super) fn identity(&self) -> Identity {
        self.store().identity()
    }

    /// A reader of the store.
    pub fn reader(&self) -> Arc<dyn Reader> {
        self.store().reader()
    }

    pub(super) fn now(&self) -> i64 {
        self.clock.now()
    }

    /// What stands in for a random number.
    pub(super) fn draw(&mut self) -> u64 {
        self.drawn += 1;
        self.drawn
    }

    /// What a signal is called that is given no name.
    pub(super) fn next_signal(&mut self) -> String {
        self.signals += 1;
        format!("s{}", self.signals)
    }

    /// Stands in for the random seed of a claim.
    pub(super) fn seed(&mut self) -> [u8; 32] {
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&self.draw().to_be_bytes());
        seed
    }

    /// The key of `w1` or `blue/w1`.
    pub(super) fn key(&mut self, word: &str) -> WorkflowKey {
        let (namespace, id) = word.split_once('/').unwrap_or(("default", word));
        WorkflowKey { namespace: self.namespace(namespace), id: WorkflowId::trusted(id) }
    }

    pub(super) fn namespace(&mut self, word: &str) -> Namespace {
        let namespace = Namespace::trusted(word);
        self.namespaces.insert(namespace.clone());
        namespace
    }

    /// The claim that `w1@1`, `w1@last`, `w1@prev`, `@last`, `@prev`, `@open` or `w1@1!` names.
    pub(super) fn held(&mut self, word: &str) -> Result<Held, String> {
        let (word, forged) = word.strip_suffix('!').map_or((word, false), |word| (word, true));
        let (id, which) = word.split_once('@').unwrap_or_else(|| panic!("a claim is named like w1@1, not {word}"));
        let key = self.key(id);
        let reader = self.reader();
        let is_open = |held: &&Held| {
            let head = reader.head(&held.key).expect("the head is read");
            head.is_some_and(|head| head.seq == held.seq && head.claim.is_some())
        };
        let mut claims = self.claims.iter().rev().filter(|held| id.is_empty() || held.key == key);
        let found = match which {
            "last" => claims.next(),
            "prev" => claims.nth(1),
            "open" => claims.find(is_open),
            seq => {
                let seq: u64 = seq.parse().unwrap_or_else(|_| panic!("a claim is named like w1@1, not {word}"));
                claims.find(|held| held.seq == seq)
            }
        };
        let mut held = found.cloned().ok_or("no such claim")?;
        if forged {
            held.token = Token(held.token.0.map(|byte| byte ^ 0xff));
        }
        Ok(held)
    }
}

/// The seed of what a command may have been granted without that anybody can hear of it again.
fn orphaned_seed(command: &Command) -> Option<[u8; 32]> {
    match command {
        Command::Claim(request) if request.id.is_none() => Some(request.terms.seed),
        Command::Start(start) => start.claim.as_ref().map(|terms| terms.seed),
        _ => None,
    }
}

/// The words of a line.
pub(super) struct Words<'a> {
    pub(super) verb: &'a str,
    plain: Vec<&'a str>,
    named: BTreeMap<&'a str, &'a str>,
    /// `$user=1` sets, `-$user` unsets.
    pub(super) writes: Writes,
}

impl<'a> Words<'a> {
    fn read(line: &'a str) -> Self {
        let mut words = line.split_whitespace();
        let verb = words.next().unwrap_or_else(|| panic!("a line begins with a verb"));
        let mut read = Self { verb, plain: Vec::new(), named: BTreeMap::new(), writes: Writes::default() };
        for word in words {
            if let Some(key) = word.strip_prefix("-$") {
                read.writes.put(Key::trusted(key), None);
            } else if let Some((key, value)) = word.strip_prefix('$').and_then(|word| word.split_once('=')) {
                let value = Json::parse(value).unwrap_or_else(|error| panic!("{word}: {error}"));
                read.writes.put(Key::trusted(key), Some(value));
            } else if let Some((name, value)) = word.split_once('=')
                && name.chars().all(|c| c.is_ascii_lowercase() || c == '_')
            {
                read.named.insert(name, value);
            } else {
                read.plain.push(word);
            }
        }
        read
    }

    /// The plain word at `at`, not counting the verb.
    pub(super) fn plain(&self, at: usize) -> &'a str {
        self.plain.get(at).unwrap_or_else(|| panic!("{} needs {} words more", self.verb, at + 1))
    }

    pub(super) fn all(&self) -> &[&'a str] {
        &self.plain
    }

    pub(super) fn has(&self, word: &str) -> bool {
        self.plain.contains(&word)
    }

    pub(super) fn named(&self, name: &str) -> Option<&'a str> {
        self.named.get(name).copied()
    }

    pub(super) fn number<T: std::str::FromStr>(&self, name: &str) -> Option<T> {
        self.named(name).map(|word| word.parse().unwrap_or_else(|_| panic!("{name} is a number, not {word}")))
    }

    pub(super) fn json(&self, name: &str) -> Option<Json> {
        self.named(name).map(|word| Json::parse(word).unwrap_or_else(|error| panic!("{name}={word}: {error}")))
    }

    pub(super) fn ms(&self, name: &str) -> Option<i64> {
        self.named(name).map(ms)
    }
}

/// Reads a span of time: `500ms`, `30s`, `2m`, `1d`.
pub(super) fn ms(word: &str) -> i64 {
    let digits = word.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &word[digits.len()..] {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => panic!("a time has a unit (ms, s, m, h, d): {word}"),
    };
    digits.parse::<i64>().unwrap_or_else(|_| panic!("a time is a number and a unit, not {word}")) * unit
}

/// Writes an instant as the time since the diary began.
pub(super) fn since(at: i64) -> String {
    let ms = at - DAY_ONE;
    if ms % 1_000 == 0 { format!("{}s", ms / 1_000) } else { format!("{ms}ms") }
}
