//! Limits: every bound at one below, at, and one above; and every kind of bad input. Nothing refused leaves a trace.

use serde_json::{Value, json};
use steadfast_pgtest::{Database, on_each_database};

use crate::site::{Site, options};

on_each_database! {
    #[tokio::test] async:
    at_its_limit_everything_is_taken,
    what_is_refused_is_named_and_leaves_no_trace,
    a_refusal_tells_sizes_and_positions_and_no_contents,
    values_come_back_as_they_were_sent,
    a_body_without_a_length_has_the_same_limit,
    large_bodies_take_turns_within_the_memory_for_them,
}

/// `depth` arrays inside one another.
fn nested(depth: usize) -> String {
    "[".repeat(depth) + &"]".repeat(depth)
}

/// A JSON string of exactly so many bytes.
fn string(bytes: usize) -> String {
    format!("\"{}\"", "x".repeat(bytes - 2))
}

fn with(field: &str, value: &str) -> String {
    if field == "name" { format!(r#"{{"name":{value}}}"#) } else { format!(r#"{{"name":"echo","{field}":{value}}}"#) }
}

fn with_option(field: &str, value: impl Into<Value>) -> String {
    let value = value.into();
    format!(r#"{{"name":"echo","options":{{"{field}":{value}}}}}"#)
}

fn with_retry(field: &str, value: u64) -> String {
    format!(r#"{{"name":"echo","options":{{"retry":{{"{field}":{value}}}}}}}"#)
}

fn with_variable(key: &str, value: &str) -> String {
    format!(r#"{{"name":"echo","writes":{{{}:{value}}}}}"#, json!(key))
}

/// Variables whose keys and values take exactly so many bytes.
fn with_writes(bytes: usize) -> String {
    const MIB: usize = 1 << 20;
    let last = bytes - 3 * MIB - 4;
    let (full, last) = (string(MIB), string(last));
    format!(r#"{{"name":"echo","writes":{{"a":{full},"b":{full},"c":{full},"d":{last}}}}}"#)
}

fn with_variables(count: usize) -> String {
    let members: Vec<_> = (0..count).map(|n| format!(r#""k{n}":0"#)).collect();
    format!(r#"{{"name":"echo","writes":{{{}}}}}"#, members.join(","))
}

/// A whole body of exactly so many bytes.
fn padded(bytes: usize) -> String {
    let body = with("input", "1");
    let spaces = bytes - body.len();
    body + &" ".repeat(spaces)
}

async fn at_its_limit_everything_is_taken(database: Database) {
    const MIB: usize = 1 << 20;
    let site = Site::idle(&database, options()).await;
    let mut count = 0;
    for body in [
        with("id", &string(127 + 2)),
        with("id", &string(128 + 2)),
        with("id", "\"é\""),
        with("name", &string(127 + 2)),
        with("name", &string(128 + 2)),
        with_variable(&"k".repeat(255), "1"),
        with_variable(&"k".repeat(256), "1"),
        with("input", &string(MIB - 1)),
        with("input", &string(MIB)),
        with_variable("k", &string(MIB - 1)),
        with_variable("k", &string(MIB)),
        with_writes(4 * MIB - 1),
        with_writes(4 * MIB),
        with_variables(4_095),
        with_variables(4_096),
        with("input", &nested(127)),
        with("input", &nested(128)),
        with_variable("k", &nested(128)),
        with_option("priority", -100),
        with_option("priority", 100),
        with_option("step_timeout_ms", 1),
        with_option("step_timeout_ms", 30 * 86_400_000_u64),
        with_option("tags", vec!["t"; 31]),
        with_option("tags", vec!["t"; 32]),
        with_option("tags", vec!["t".repeat(128)]),
        with_retry("attempts_max", 1),
        with_retry("factor_percent", 100),
        with_retry("factor_percent", 10_000),
        with_retry("jitter_percent", 100),
        with_retry("max_delay_ms", 31_557_600_000),
        with_retry("first_delay_ms", 31_557_600_000),
        with_retry("attempts_max", 1_000_000_000),
        with("input", r#""\u0000""#),
        with("input", r#"{"\ud83d\ude00":"\ud83d\ude00"}"#),
        with("options", "{}"),
        with("options", "null"),
        with("writes", "{}"),
        with("writes", "null"),
        padded((16 << 20) - 1),
        padded(16 << 20),
    ] {
        let size = body.len();
        let answer = site.start(body.clone()).await;
        assert_eq!(answer.status, 201, "{size} bytes: {}", answer.body);
        count += 1;
    }
    assert_eq!(site.ids().await.len(), count);
}

async fn what_is_refused_is_named_and_leaves_no_trace(database: Database) {
    const MIB: usize = 1 << 20;
    let site = Site::idle(&database, options()).await;
    for (body, expected) in [
        // Sizes, one above.
        (with("id", &string(129 + 2)), "400 invalid_id id 128"),
        (with("id", &format!("\"{}\"", "é".repeat(65))), "400 invalid_id id 128"),
        (with("name", &string(129 + 2)), "400 invalid_name name 128"),
        (with_variable(&"k".repeat(257), "1"), "400 invalid_key writes 256"),
        (with("input", &string(MIB + 1)), "413 value_too_large input 1048576"),
        (with_variable("big", &string(MIB + 1)), "413 value_too_large writes.big 1048576"),
        (with_writes(4 * MIB + 1), "413 writes_too_large writes 4194304"),
        (with_variables(4_097), "413 writes_too_large writes 4096"),
        (with("input", &nested(129)), "400 json_too_deep input 128"),
        (with("input", &nested(1_000_000)), "400 json_too_deep input 128"),
        (with_variable("k", &nested(129)), "400 json_too_deep writes.k 128"),
        (padded((16 << 20) + 1), "413 body_too_large 16777216"),
        // Options, one beyond.
        (with_option("priority", -101), "400 invalid_options options.priority"),
        (with_option("priority", 101), "400 invalid_options options.priority"),
        (with_option("priority", 1_u64 << 40), "400 invalid_options options.priority"),
        (with_option("priority", "high"), "400 invalid_request options.priority"),
        (with_option("priority", 1.5), "400 invalid_request options.priority"),
        (with_option("step_timeout_ms", 0), "400 invalid_options options.step_timeout_ms"),
        (with_option("step_timeout_ms", 30 * 86_400_000_u64 + 1), "400 invalid_options options.step_timeout_ms"),
        (with_option("step_timeout_ms", -1), "400 invalid_request options.step_timeout_ms"),
        (with_option("tags", vec!["t"; 33]), "400 invalid_options options.tags 32"),
        (with_option("tags", vec!["t".repeat(129)]), "400 invalid_tag options.tags 128"),
        (with_option("tags", vec![""]), "400 invalid_tag options.tags 128"),
        (with_option("tags", vec!["a\nb"]), "400 invalid_tag options.tags"),
        (with_option("tags", json!([1])), "400 invalid_request options.tags"),
        (with_option("deadline", 1), "400 invalid_request options.deadline"),
        (with_retry("attempts_max", 0), "400 invalid_options options.retry.attempts_max"),
        (with_retry("factor_percent", 99), "400 invalid_options options.retry.factor_percent"),
        (with_retry("factor_percent", 10_001), "400 invalid_options options.retry.factor_percent"),
        (with_retry("jitter_percent", 101), "400 invalid_options options.retry.jitter_percent"),
        (with_retry("max_delay_ms", 31_557_600_001), "400 invalid_options options.retry.max_delay_ms"),
        (with_retry("first_delay_ms", 31_557_600_001), "400 invalid_options options.retry.first_delay_ms"),
        (with_retry("attempts_max", 1_000_000_001), "400 invalid_options options.retry.attempts_max"),
        (with_retry("attempts_max", 1 << 32), "400 invalid_options options.retry.attempts_max"),
        (with_retry("attempts", 1), "400 invalid_request options.retry.attempts"),
        // Names.
        (with("id", r#""""#), "400 invalid_id id 128"),
        (with("id", r#"".""#), "400 invalid_id id"),
        (with("id", r#""..""#), "400 invalid_id id"),
        (with("id", r#""a\u0000b""#), "400 invalid_id id"),
        (with("id", r#""a\nb""#), "400 invalid_id id"),
        (with("id", "7"), "400 invalid_request id"),
        (with("name", r#""""#), "400 invalid_name name 128"),
        (with("name", r#""\u202ename""#), "400 invalid_name name"),
        (with("name", "null"), "400 invalid_request name"),
        (with("name", "[]"), "400 invalid_request name"),
        (with_variable("", "1"), "400 invalid_key writes 256"),
        (with_variable("input", "1"), "400 invalid_key writes.input"),
        (with_variable("signal:x", "1"), "400 invalid_key writes.signal:x"),
        (with_variable("a\nb", "1"), "400 invalid_key writes"),
        // JSON.
        (String::new(), "400 invalid_json"),
        ("{".to_owned(), "400 invalid_json"),
        ("not json".to_owned(), "400 invalid_json"),
        (r#"{"name":"echo"} {}"#.to_owned(), "400 invalid_json"),
        (r#"{"name":"echo",}"#.to_owned(), "400 invalid_json"),
        (r"{'name':'echo'}".to_owned(), "400 invalid_json"),
        ("\u{feff}{\"name\":\"echo\"}".to_owned(), "400 invalid_json"),
        (with("input", "NaN"), "400 invalid_json"),
        (with("input", "01"), "400 invalid_json"),
        (with("input", "1e9999999999999999999"), "400 invalid_json"),
        (with("input", r#""\ud800""#), "400 invalid_json"),
        (with("input", r#"{"\udc00":1}"#), "400 invalid_json"),
        (with("input", r#"{"a\u0000":1}"#), "400 invalid_json"),
        (with("writes", r#"{"a\u0000":1}"#), "400 invalid_json"),
        (with("input", r#"{"a":1,"a":1}"#), "400 invalid_json"),
        (with("input", r#"[{"a":1,"\u0061":2}]"#), "400 invalid_json"),
        (with("writes", r#"{"a":1,"a":1}"#), "400 invalid_json"),
        (r#"{"name":"echo","id":"a","id":"b"}"#.to_owned(), "400 invalid_json"),
        // Form.
        ("{}".to_owned(), "400 invalid_request name"),
        ("[]".to_owned(), "400 invalid_request body"),
        ("null".to_owned(), "400 invalid_request body"),
        (with("inputs", "1"), "400 invalid_request inputs"),
        (with("writes", "[]"), "400 invalid_request writes"),
        (with("options", "[]"), "400 invalid_request options"),
    ] {
        let answer = site.start(body.clone()).await;
        let line: String = body.chars().take(100).collect();
        assert!(answer.status >= 400, "accepted: {line}");
        assert_eq!(answer.problem(), expected, "{line}");
        assert_eq!(answer.json()["class"], "refused_final", "{line}");
        // The same as a line of a bulk, where it is no longer than a line may be and has no line feed.
        if body.len() <= 2 << 20 && !body.is_empty() {
            let line_answer = site.bulk(body.clone()).await;
            let document = &line_answer.json()["error"];
            let status = document["status"].as_u64().unwrap() as u16;
            assert_eq!(crate::site::problem(status, document), expected, "{line}");
        }
    }
    assert!(site.ids().await.is_empty());
}

async fn a_refusal_tells_sizes_and_positions_and_no_contents(database: Database) {
    let site = Site::idle(&database, options()).await;
    let answer = site.start(with("id", &string(200 + 2))).await.json();
    assert_eq!((&answer["size"], &answer["limit"]), (&200.into(), &128.into()));
    let answer = site.start(r#"{"name":"echo","input":{"secret":1,"secret":2}}"#).await;
    assert!(answer.body.contains("at byte 35") && !answer.body.contains("secret"), "{}", answer.body);
    let answer = site.start(b"{\"name\":\"\xff\"}".to_vec()).await;
    assert_eq!(answer.problem(), "400 invalid_json");
    assert!(answer.body.contains("at byte 9"), "{}", answer.body);
    let answer = site.start(r#"{"name":"echo","options":{"priority":"secret"}}"#).await;
    assert!(!answer.body.contains("secret"), "{}", answer.body);
    let size = (16 << 20) + 25;
    assert_eq!(site.start(padded(size)).await.json()["size"], size);
}

async fn values_come_back_as_they_were_sent(database: Database) {
    let site = Site::new(&database).await;
    for value in [
        "9007199254740993",
        "18446744073709551617",
        "-0",
        "0.1",
        "0.10",
        "1e400",
        "1E+2",
        r#""\u0000""#,
        r#""\u00e9 é \ud83d\ude00""#,
        r#"{"b":1, "a":[ ],"":null}"#,
        "null",
        "false",
    ] {
        let id = word_of(&site.start(with("input", value)).await.json());
        let result = site.result(&id).await;
        assert_eq!(result.body, format!(r#"{{"status":"completed","result":{value}}}"#));
        let workflow = site.get(&format!("/v1/workflows/{id}")).await;
        assert!(workflow.body.ends_with(&format!(r#","result":{value}}}"#)), "{}", workflow.body);
        let variable = site.get(&format!("/v1/workflows/{id}/scratchpad/input")).await;
        assert_eq!(variable.body, format!(r#"{{"key":"input","value":{value},"seq":0}}"#));
        let events = site.get(&format!("/v1/workflows/{id}/events")).await;
        assert!(events.body.contains(&format!(r#""writes":{{"input":{value}}}"#)), "{}", events.body);
    }
}

fn word_of(answer: &Value) -> String {
    crate::site::word(&answer["id"])
}

async fn a_body_without_a_length_has_the_same_limit(database: Database) {
    use futures_util::stream;
    let site = Site::idle(&database, options()).await;
    let padded = |spaces: usize| {
        let pieces = std::iter::once(with("input", "1")).chain((0..spaces / 1_024).map(|_| " ".repeat(1_024)));
        reqwest::Body::wrap_stream(stream::iter(pieces.map(Ok::<_, std::convert::Infallible>)))
    };
    assert_eq!(site.start(padded(15 << 20)).await.status, 201);
    assert_eq!(site.start(padded(16 << 20)).await.problem(), "413 body_too_large 16777216");
    assert_eq!(site.ids().await.len(), 1);
}

async fn large_bodies_take_turns_within_the_memory_for_them(database: Database) {
    // Room for one at a time; each alone would take more than all of it.
    let site = Site::idle(&database, steadfast_server::Options { body_memory: 1 << 20, ..options() }).await;
    let answers = (0..8).map(|_| site.start(with("input", &string(1 << 20))));
    let answers = futures_util::future::join_all(answers).await;
    assert!(answers.iter().all(|answer| answer.status == 201), "{answers:?}");
}
