//! Bulk: lines in, outcomes out, each for itself.

use steadfast::Limits;
use steadfast::store::faults::Fault;
use steadfast_pgtest::{Database, on_each_database};
use steadfast_server::Options;

use crate::site::{Answer, Raw, Site, faulty, open, options, problem, soon};

on_each_database! {
    #[tokio::test] async:
    each_line_has_its_own_outcome_in_order,
    nothing_in_is_nothing_out,
    ten_thousand_lines_are_taken_and_no_more,
    a_line_has_a_size,
    an_outcome_comes_before_the_next_line_is_sent,
    a_client_that_reads_only_afterwards_is_served,
    a_client_that_hangs_up_half_way_leaves_whole_lines_only,
    bulks_are_few_at_a_time,
    a_fault_of_the_store_is_told_to_the_lines_it_met,
    a_configured_number_of_lines_holds,
}

const HEAD: &str = "POST /v1/workflows/bulk HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n";

fn line(id: &str) -> String {
    format!("{{\"name\":\"echo\",\"id\":\"{id}\"}}\n")
}

/// The outcomes in short: `1 a`, `2 a replay`, `3 400 invalid_id id`.
fn outcomes(answer: &Answer) -> Vec<String> {
    assert_eq!((answer.status, answer.header("content-type")), (200, "application/x-ndjson"));
    assert!(answer.body.is_empty() || answer.body.ends_with('\n'), "{}", answer.body);
    let short = |line: &str| {
        let outcome: serde_json::Value = serde_json::from_str(line).unwrap();
        let number = &outcome["line"];
        match outcome.get("error") {
            Some(error) => format!("{number} {}", problem(error["status"].as_u64().unwrap() as u16, error)),
            None if outcome["replay"] == true => format!("{number} {} replay", outcome["id"].as_str().unwrap()),
            None => format!("{number} {}", outcome["id"].as_str().unwrap()),
        }
    };
    answer.body.lines().map(short).collect()
}

async fn each_line_has_its_own_outcome_in_order(database: Database) {
    let site = Site::new(&database).await;
    let body = [
        r#"{"name":"echo","id":"a","input":1}"#,
        r#"{"name":"echo","id":"a","input":1}"#,
        r#"{"name":"echo","id":"a","input":2}"#,
        r#"{"name":"echo","id":""}"#,
        "",
        "not json",
        r#"{"name":"echo","id":"b","extra":1}"#,
        r#"{"name":"echo","id":"c"}"#,
    ]
    .join("\r\n");
    let answer = site.bulk(body).await;
    assert_eq!(
        outcomes(&answer),
        [
            "1 a",
            "2 a replay",
            "3 409 identity_conflict",
            "4 400 invalid_id id 128",
            "6 400 invalid_json",
            "7 400 invalid_request extra",
            "8 c"
        ]
    );
    let first = answer.body.lines().next().unwrap();
    assert_eq!(first, r#"{"line":1,"id":"a","replay":false}"#);
    assert_eq!(site.result("a").await.json()["result"], 1);
    assert_eq!(site.result("c").await.status, 200);
    let mut ids = site.ids().await;
    ids.sort_unstable();
    assert_eq!(ids, ["a", "c"]);
}

async fn nothing_in_is_nothing_out(database: Database) {
    let site = Site::new(&database).await;
    assert_eq!(outcomes(&site.bulk("").await), [""; 0]);
    assert_eq!(outcomes(&site.bulk("\n\r\n \n").await), [""; 0]);
}

async fn ten_thousand_lines_are_taken_and_no_more(database: Database) {
    let site = Site::idle(&database, options()).await;
    let body: String = (1..=10_001).map(|n| line(&n.to_string())).collect();
    let answer = outcomes(&site.bulk(body.clone()).await);
    assert_eq!(answer.len(), 10_001);
    for (at, outcome) in answer[..10_000].iter().enumerate() {
        assert_eq!(*outcome, format!("{n} {n}", n = at + 1));
    }
    assert_eq!(answer[10_000], "10001 413 bulk_too_large 10000");
    assert_eq!(site.ids().await.len(), 10_000);
    // What follows the line too many is not looked at.
    let again = outcomes(&site.bulk(body + "not json\n").await);
    assert_eq!((again.len(), again[9_999].as_str()), (10_001, "10000 10000 replay"));
    let exact: String = (1..=10_000).map(|n| line(&n.to_string())).collect();
    let exact = outcomes(&site.bulk(exact).await);
    assert_eq!((exact.len(), exact[9_999].as_str()), (10_000, "10000 10000 replay"));
}

async fn a_line_has_a_size(database: Database) {
    const MAX: usize = 2 << 20;
    let site = Site::idle(&database, options()).await;
    let padded = |id: &str, size: usize| {
        let start = line(id);
        let start = start.trim_end();
        format!("{start}{}\n", " ".repeat(size - start.len()))
    };
    let body = [padded("a", MAX - 1), padded("b", MAX), padded("c", MAX + 1), padded("d", 5 << 20), line("e")].concat();
    assert_eq!(
        outcomes(&site.bulk(body).await),
        ["1 a", "2 b", "3 413 line_too_large 2097152", "4 413 line_too_large 2097152", "5 e"]
    );
    let mut ids = site.ids().await;
    ids.sort_unstable();
    assert_eq!(ids, ["a", "b", "e"]);
}

async fn an_outcome_comes_before_the_next_line_is_sent(database: Database) {
    let site = Site::new(&database).await;
    let mut raw = site.connect().await;
    raw.send(HEAD).await;
    for n in 1..=3 {
        raw.chunk(&line(&n.to_string())).await;
        raw.read_until(&format!("{{\"line\":{n},\"id\":\"{n}\",\"replay\":false}}\n")).await;
    }
    // A line in pieces is one line.
    raw.chunk("{\"name\":\"echo\",").await;
    raw.chunk("\"id\":\"4\"}").await;
    raw.send("0\r\n\r\n").await;
    let last = raw.read_until("\r\n0\r\n\r\n").await;
    assert!(last.contains("{\"line\":4,\"id\":\"4\",\"replay\":false}\n"), "{last}");
}

async fn a_client_that_reads_only_afterwards_is_served(database: Database) {
    let site = Site::idle(&database, options()).await;
    let mut raw = site.connect().await;
    raw.send(HEAD).await;
    // Outcomes of several MB: more than the sockets take while nobody reads.
    for _ in 0..100 {
        raw.chunk(&format!("{{\"{}\":1}}\n", "x".repeat(128)).repeat(100)).await;
    }
    raw.send("0\r\n\r\n").await;
    let answer = raw.read_until("\r\n0\r\n\r\n").await;
    assert!(answer.contains("{\"line\":10000,"), "{}", answer.len());
}

async fn a_client_that_hangs_up_half_way_leaves_whole_lines_only(database: Database) {
    let site = Site::with(Options { bulks_max: 1, ..options() }, open(&database).concurrency(0)).await;
    let mut raw = site.connect().await;
    raw.send(HEAD).await;
    raw.chunk(&(line("a") + &line("b"))).await;
    raw.read_until("{\"line\":2,\"id\":\"b\",\"replay\":false}\n").await;
    // Complete JSON, but no line: the rest of it may have been on its way.
    raw.chunk(line("c").trim_end()).await;
    drop(raw);
    // There is room for the next bulk once the first has noticed.
    let next = async {
        loop {
            let answer = site.bulk(line("d")).await;
            if answer.status == 200 {
                return answer;
            }
            assert_eq!(answer.problem(), "429 overloaded");
        }
    };
    let answer = soon("the bulk to be given up", next).await;
    assert_eq!(outcomes(&answer), ["1 d"]);
    let mut ids = site.ids().await;
    ids.sort_unstable();
    assert_eq!(ids, ["a", "b", "d"]);
}

async fn bulks_are_few_at_a_time(database: Database) {
    let site = Site::with(Options { bulks_max: 2, ..options() }, open(&database).concurrency(0)).await;
    let mut open: Vec<Raw> = Vec::new();
    for n in 0..2 {
        let mut raw = site.connect().await;
        raw.send(HEAD).await;
        raw.chunk(&line(&n.to_string())).await;
        raw.read_until("\"replay\":false}\n").await;
        open.push(raw);
    }
    let refused = site.bulk(line("x")).await;
    assert_eq!(refused.problem(), "429 overloaded");
    assert_eq!(refused.header("retry-after"), "1");
    assert_eq!(site.start(line("single")).await.status, 201, "a single start is none of them");
    let mut last = open.pop().unwrap();
    last.send("0\r\n\r\n").await;
    last.read_until("0\r\n\r\n").await;
    let room = async { while site.bulk(line("x")).await.status != 200 {} };
    soon("room for a bulk", room).await;
}

async fn a_fault_of_the_store_is_told_to_the_lines_it_met(database: Database) {
    let (builder, plan) = faulty(&database);
    let site = Site::with(options(), builder.concurrency(0)).await;
    plan.add([Fault::UnknownWritten]);
    let mut raw = site.connect().await;
    raw.send(HEAD).await;
    raw.chunk(&line("a")).await;
    let outcome = raw.read_until("}\n").await;
    assert!(outcome.contains("outcome_unknown") && outcome.contains("\"id\":\"a\""), "{outcome}");
    raw.chunk(&(line("a") + &line("b"))).await;
    raw.send("0\r\n\r\n").await;
    let rest = raw.read_until("0\r\n\r\n").await;
    assert!(rest.contains("{\"line\":2,\"id\":\"a\",\"replay\":true}"), "{rest}");
    assert!(rest.contains("{\"line\":3,\"id\":\"b\",\"replay\":false}"), "{rest}");
}

async fn a_configured_number_of_lines_holds(database: Database) {
    let limits = Limits { bulk_max: 2, ..Limits::default() };
    let site = Site::with(options(), open(&database).concurrency(0).limits(limits)).await;
    let answer = site.bulk(format!("\n{}{}{}", line("a"), line("b"), line("c"))).await;
    assert_eq!(outcomes(&answer), ["2 a", "3 413 bulk_too_large 2"], "empty lines count");
    let answer = site.bulk(format!("{}{}\n\n", line("a"), line("b"))).await;
    assert_eq!(outcomes(&answer), ["1 a replay", "2 b"], "but are no request too many");
}
