//! Random histories, told on every store: the same answers, the same content, and the laws hold.
//!
//! A failing history is printed as the diary it is, already made small. Its page can be told again as a scenario.

mod harness;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, TestCaseError};
use steadfast_store::conformance::{Diary, Dice, Harness, invent, verbs};

/// A line is made up from at most so many choices.
type Thrown = [u16; 10];

/// Batches of lines as they come out of random choices.
fn pages() -> impl Strategy<Value = Vec<String>> {
    let line = (any::<Thrown>(), 0..3u8).prop_map(|(thrown, joins)| {
        let line = invent(&mut Dice::new(&thrown));
        (line, joins == 2)
    });
    prop::collection::vec(line, 1..120).prop_map(|lines| {
        let mut page: Vec<String> = Vec::with_capacity(lines.len());
        for (line, joins) in lines {
            let both = |last: &String| verbs::is_command(last.trim_start_matches("+ ")) && verbs::is_command(&line);
            page.push(if joins && page.last().is_some_and(both) { format!("+ {line}") } else { line });
        }
        page
    })
}

/// Tells the page on a new store and answers what was said and what is left.
fn told(harness: impl Harness + 'static, page: &[String]) -> (Vec<String>, String) {
    let mut diary = Diary::begin(Box::new(harness));
    let answers = diary.say_all(page);
    let dump = diary.dump();
    diary.end();
    (answers, dump)
}

/// Tells a page and answers what was said and what is left.
type Tell = fn(&[String]) -> (Vec<String>, String);

/// The stores that a history is told on, each with how it is made: a new kind joins here. The first is the measure.
const STORES: [(&str, Tell); 4] = [
    ("memory", |page| told(harness::Memory::default(), page)),
    ("sqlite", |page| told(harness::Sqlite::default(), page)),
    ("postgres", |page| told(harness::Postgres::default(), page)),
    ("grown", |page| told(harness::Grown::default(), page)),
];

fn print(page: &[String], measure: &[String], name: &str, answers: &[String]) -> String {
    let lines = page.iter().zip(measure.iter().zip(answers)).map(|(line, (measure, answer))| {
        let differs = if measure == answer { String::new() } else { format!("   <-- {name}: {answer}") };
        format!("  {line:<50}  {measure}{differs}\n")
    });
    lines.collect()
}

proptest! {
    #![proptest_config(Config { cases: 128, max_shrink_iters: 2_000, ..Config::default() })]

    #[test]
    fn every_store_tells_the_same_history(page in pages()) {
        let [(_, measure), others @ ..] = STORES;
        let (measure, content) = measure(&page);
        for (name, tell) in others {
            let (answers, dump) = tell(&page);
            if measure != answers {
                return Err(TestCaseError::fail(format!("answers differ:\n{}", print(&page, &measure, name, &answers))));
            }
            if content != dump {
                let said = print(&page, &measure, name, &answers);
                let lines = content.lines().zip(dump.lines());
                let differing: Vec<String> =
                    lines.filter(|(a, b)| a != b).map(|(a, b)| format!("memory: {a}\n{name}: {b}\n")).collect();
                return Err(TestCaseError::fail(format!("contents differ after\n{said}{}", differing.concat())));
            }
        }
    }
}

/// What random histories are good for: they reach every kind of answer.
#[test]
fn histories_reach_every_kind_of_answer() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..300 {
        let page = pages().new_tree(&mut runner).expect("pages can always be made up").current();
        let (answers, _) = told(harness::Memory::default(), &page);
        for (line, answer) in page.iter().zip(answers) {
            let verb = line.trim_start_matches("+ ").split(' ').next().unwrap_or_default();
            let answer: String = answer.chars().filter(|c| !c.is_ascii_digit()).collect();
            for part in answer.split([',', '|']) {
                let kind: Vec<&str> = part.split_whitespace().take(2).collect();
                seen.insert(format!("{verb}: {}", kind.join(" ")));
            }
        }
    }
    let wanted = [
        "start: started",
        "start: started w@:start",
        "start: replay of",
        "start: identity_conflict with",
        "start: not committed",
        "start: unknown",
        "claim: w@:start",
        "claim: w@:start attempt",
        "claim: w@:start delivery",
        "claim: blue/w@:start",
        "claim: -",
        "complete: committed running",
        "complete: committed sleeping",
        "complete: committed completed",
        "complete: lost",
        "complete: no such",
        "again: already_committed running",
        "again: already_committed completed",
        "again: already_committed backoff",
        "again: replay of",
        "fail: committed backoff",
        "fail: committed failed",
        "return: committed ready",
        "beat: until s",
        "beat: lost",
        "cancel: cancelled",
        "cancel: already completed",
        "cancel: already failed",
        "cancel: unknown id",
        "complete: committed waiting",
        "again: already_committed waiting",
        "signal: accepted",
        "signal: taken",
        "signal: replay of",
        "signal: identity_conflict with",
        "signal: already completed",
        "signal: already cancelled",
        "signal: unknown id",
        "sweep: woken",
        "sweep: waits over",
        "sweep: leases lost",
        "sweep: timed out",
        "sweep: alive",
        "sweep: more",
        "give_back: given back",
        "give_back: alive",
    ];
    let missing: Vec<&str> = wanted.into_iter().filter(|wanted| !seen.contains(*wanted)).collect();
    assert!(missing.is_empty(), "never reached: {missing:#?}\nreached: {seen:#?}");
}
