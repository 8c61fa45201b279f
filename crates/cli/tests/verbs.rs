//! Every verb of the real binary against a real server: what it prints, and how it ends.

mod common;

use std::process::Command;

use common::{Server, binary, run, stderr, stdout, store};
use serde_json::Value;
use steadfast_pgtest::{Database, on_each_database};

on_each_database! {
    #[test]:
    verbs_say_what_they_did_and_end_with_their_code,
    json_is_one_value_and_has_the_documented_members,
    values_are_shown_byte_for_byte,
    a_start_without_an_id_names_the_one_it_made,
    serve_admits_without_definitions_and_runs_samples_when_asked,
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Rows of: arguments, exit code, a part of standard output, a part of standard error.
fn verbs_say_what_they_did_and_end_with_their_code(database: Database) {
    let server = Server::dev_on(&database.url());
    let long = "x".repeat(129);
    for (args, code, out, err) in [
        (vec!["start", "hello", "--input", r#"{"steps":2}"#, "--id", "a", "--wait"], 0, r#""steps":2"#, ""),
        (vec!["start", "hello", "--input", r#"{"steps":2.0}"#, "--id", "a"], 0, "started before", ""),
        (vec!["start", "hello", "--input", r#"{"steps":3}"#, "--id", "a"], 6, "", "identity_conflict"),
        (vec!["start", "hello", "--input", "{bad", "--id", "b"], 6, "", "invalid_json"),
        (vec!["start", "hello", "--input", r#"{"a":1,"a":2}"#, "--id", "b"], 6, "", "invalid_json"),
        (vec!["start", "hello", "--id", &long], 6, "", "invalid_id"),
        (vec!["start", "hello", "--priority", "101"], 6, "", "invalid_options"),
        (vec!["start", "hello", "--input", r#"{"steps":0}"#, "--id", "zero", "--wait"], 4, "", "invalid_input"),
        (
            vec!["start", "flaky", "--input", r#"{"failures":2}"#, "--id", "with / and ü", "--wait"],
            0,
            r#""attempts":3"#,
            "",
        ),
        (vec!["start", "flight", "--input", r#"{"row":1}"#, "--wait"], 0, r#""carrier":"UA""#, ""),
        (vec!["start", "sleeper", "--input", r#"{"seconds":3600}"#, "--id", "s"], 0, "s", ""),
        (vec!["start", "nobody_knows", "--id", "n"], 0, "n", "no worker"),
        (vec!["show", "with / and ü"], 0, "attempt 2 failed", ""),
        (vec!["show", "n"], 0, "blocked", ""),
        (vec!["why", "n"], 0, "no worker knows step start", ""),
        (vec!["why", "a"], 0, "a has ended: completed", ""),
        (vec!["why", "zero"], 0, "zero has ended: failed (invalid_input)", ""),
        (vec!["why", "missing"], 5, "", "unknown_workflow"),
        (vec!["show", "missing"], 5, "", "unknown_workflow"),
        (vec!["events", "a"], 0, "workflow_completed", ""),
        (vec!["events", "a", "--from", "2", "--limit", "1"], 0, "step_completed", "--from 3"),
        (vec!["scratchpad", "a"], 0, "made", ""),
        (vec!["scratchpad", "a", "made"], 0, "2", ""),
        (vec!["scratchpad", "a", "nothing"], 5, "", ""),
        (vec!["list"], 0, "with / and ü", ""),
        (vec!["list", "--status", "failed"], 0, "zero", ""),
        (vec!["list", "--status", "nonsense"], 6, "", "status"),
        (vec!["list", "--name", "sleeper"], 0, "sleeping", ""),
        (vec!["why", "s"], 0, "s sleeps until", ""),
        (vec!["start", "approval", "--input", r#"{"seconds":3600}"#, "--id", "ap"], 0, "ap", ""),
        (vec!["signal", "ap", "other", "--payload", "[1.0]", "--signal-id", "o"], 0, "o", ""),
        (vec!["signal", "ap", "other", "--payload", "[1]", "--signal-id", "o"], 0, "accepted before", ""),
        (vec!["signal", "ap", "other", "--payload", "2", "--signal-id", "o"], 6, "", "identity_conflict"),
        (vec!["signal", "ap", "other", "--payload", "{bad"], 6, "", "invalid_json"),
        (vec!["signal", "ap", ""], 6, "", "invalid_signal"),
        (vec!["inbox", "ap"], 0, "[1.0]", ""),
        (vec!["signal", "ap", "approve", "--payload", r#"{"by":"ops"}"#, "--signal-id", "yes"], 0, "yes", ""),
        (vec!["start", "approval", "--input", r#"{"seconds":3600}"#, "--id", "ap", "--wait"], 0, r#""by":"ops""#, ""),
        (vec!["show", "ap"], 0, r#"signal approve (yes): {"by":"ops"}"#, ""),
        (vec!["signal", "ap", "approve"], 6, "", "workflow_finished"),
        (vec!["signal", "missing", "approve"], 5, "", "unknown_workflow"),
        (vec!["inbox", "missing"], 5, "", "unknown_workflow"),
        (vec!["cancel", "s", "--reason", "enough"], 0, "is cancelled", ""),
        (vec!["cancel", "s"], 0, "had ended before: cancelled", ""),
        (vec!["cancel", "missing"], 5, "", "unknown_workflow"),
        (vec!["completions", "bash"], 0, "_steadfast", ""),
        (vec!["nonsense"], 2, "", "unrecognized"),
        (vec!["start"], 2, "", "NAME"),
    ] {
        let output = run(Some(&server.url), &args);
        let (printed, said) = (stdout(&output), stderr(&output));
        assert_eq!(output.status.code(), Some(code), "{args:?}: {printed} {said}");
        assert!(printed.contains(out), "{args:?}: {printed}");
        assert!(said.contains(err), "{args:?}: {said}");
    }
    server.stop();
}

fn json_is_one_value_and_has_the_documented_members(database: Database) {
    let server = Server::dev_on(&database.url());
    let get = |args: &[&str]| {
        let output = run(Some(&server.url), args);
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        json(&stdout(&output))
    };
    let started = get(&["start", "hello", "--id", "a", "--json"]);
    assert_eq!((&started["id"], &started["replay"]), (&Value::from("a"), &Value::from(false)));
    assert_eq!(get(&["start", "hello", "--id", "a", "--wait", "--json"])["result"]["steps"], 3);
    let shown = get(&["show", "a", "--json"]);
    for (member, value) in [("id", "a"), ("name", "hello"), ("status", "completed")] {
        assert_eq!(shown[member], value);
    }
    assert_eq!(shown["result"]["steps"], 3);
    assert_eq!(shown["seq"], 7);
    get(&["start", "sleeper", "--input", r#"{"seconds":60}"#, "--id", "s", "--json"]);
    let why = get(&["why", "s", "--json"]);
    assert!(["ready", "running", "sleeping"].contains(&why["why"].as_str().unwrap()), "{why}");
    get(&["start", "flaky", "--input", r#"{"failures":500}"#, "--id", "f", "--json"]);
    let failed =
        run(Some(&server.url), &["start", "flaky", "--input", r#"{"failures":500}"#, "--id", "f", "--wait", "--json"]);
    assert_eq!(failed.status.code(), Some(4));
    assert_eq!(json(&stdout(&failed))["error"]["code"], "invalid_input");
    assert_eq!(json(&stderr(&failed))["error"]["code"], "invalid_input");
    assert_eq!(get(&["show", "f", "--json"])["error"]["code"], "invalid_input");
    assert_eq!(get(&["events", "a", "--json"])["events"].as_array().unwrap().len(), 8);
    let pad = get(&["scratchpad", "a", "--json"]);
    assert_eq!(pad["variables"].as_array().unwrap().len(), 2);
    let list = get(&["list", "--limit", "2", "--json"]);
    assert_eq!(list["workflows"].as_array().unwrap().len(), 2);
    let next = list["next"].as_str().unwrap().to_owned();
    let rest = get(&["list", "--before", &next, "--json"]);
    assert_eq!((rest["workflows"].as_array().unwrap().len(), &rest["next"]), (1, &Value::Null));
    assert_eq!(get(&["cancel", "s", "--json"])["outcome"], "cancelled");
    let verified = get(&["verify", "--store", &database.url(), "--json"]);
    assert_eq!((&verified["workflows"], &verified["fault_count"]), (&Value::from(3), &Value::from(0)));
    let refused = run(Some(&server.url), &["show", "missing", "--json"]);
    assert_eq!(json(&stderr(&refused))["error"]["code"], "unknown_workflow");
    server.stop();
}

/// What users store comes out as it went in, whatever a double or a sorted map would make of it.
fn values_are_shown_byte_for_byte(database: Database) {
    let server = Server::dev_on(&database.url());
    let value = r#"{"z":1e400,"n":123456789012345678901234,"d":0.10,"a":[-0, 1]}"#;
    assert!(run(Some(&server.url), &["start", "nobody_knows", "--id", "v", "--input", value]).status.success());
    for args in [
        vec!["events", "v", "--json"],
        vec!["events", "v"],
        vec!["show", "v"],
        vec!["scratchpad", "v", "--json"],
        vec!["scratchpad", "v", "input"],
        vec!["scratchpad", "v"],
    ] {
        let output = run(Some(&server.url), &args);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", stderr(&output));
        assert!(stdout(&output).contains(value), "{args:?}: {}", stdout(&output));
    }
    assert!(stdout(&run(Some(&server.url), &["list", "--json"])).contains(r#""id":"v""#));
    server.stop();
}

/// An id that was made here is named whenever its outcome is open, so that nobody is left without it.
fn a_start_without_an_id_names_the_one_it_made(database: Database) {
    let server = Server::dev_on(&database.url());
    let waiting = Command::new(binary())
        .args(["start", "sleeper", "--input", r#"{"seconds":3600}"#, "--wait", "--json"])
        .env("STEADFAST_URL", &server.url)
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let id = loop {
        let list = json(&stdout(&run(Some(&server.url), &["list", "--json"])));
        if let Some(id) = list["workflows"][0]["id"].as_str() {
            break id.to_owned();
        }
    };
    let url = server.url.clone();
    server.kill();
    let ended = waiting.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(7));
    let error = &json(&stderr(&ended))["error"];
    assert_eq!((&error["id"], &error["code"]), (&Value::from(id.as_str()), &Value::from("unreachable")));
    let refused = run(Some(&url), &["start", "hello"]);
    assert_eq!(refused.status.code(), Some(7));
    assert!(stderr(&refused).contains("repeat it with --id "), "{}", stderr(&refused));
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_made() {
    let busy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let busy = busy.local_addr().unwrap().to_string();
    let data = tempfile::tempdir().unwrap();
    let folder = data.path().join("new");
    let folder = folder.to_str().unwrap();
    for (args, code, err) in [
        (vec!["dev", "--data", folder, "--listen", &busy], 1, "another port"),
        (vec!["dev", "--data", folder, "--listen", "0.0.0.0:0"], 6, "loopback"),
        (vec!["dev", "--data", folder, "--listen", "localhost:7420"], 2, "127.0.0.1:7420"),
        (vec!["dev", "--data", folder, "--concurrency", "0"], 2, "concurrency"),
        (vec!["demo", "--data", folder, "--listen", "0.0.0.0:0"], 1, "loopback"),
        (vec!["demo", "--data", folder, "--rows", "336777"], 2, "336776"),
        (vec!["bench", "embedded", "--in-flight", "0"], 2, "in-flight"),
        (vec!["start", "hello", "--input", "@/nowhere"], 6, "unreadable_input"),
        (vec!["list", "--limit", "0"], 2, "limit"),
    ] {
        let output = run(None, &args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(err), "{args:?}: {}", stderr(&output));
    }
    assert!(!std::path::Path::new(folder).exists());
}

/// About a file: its lock, and copies of it. What differs in PostgreSQL is told in `postgres.rs`.
#[test]
fn a_store_is_verified_and_backed_up_beside_its_owner_and_has_no_second_one() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::dev(data.path());
    run(Some(&server.url), &["start", "hello", "--id", "a", "--wait"]);
    let folder = data.path().to_str().unwrap();
    let second = Command::new(binary()).args(["dev", "--data", folder, "--listen", "127.0.0.1:0"]).output().unwrap();
    assert_eq!(second.status.code(), Some(1));
    let said = stderr(&second);
    assert!(said.contains("store_owned") && said.contains(&format!("process {}", server.pid())), "{said}");
    let copy = data.path().join("copy.db");
    let copy = copy.to_str().unwrap();
    assert!(run(None, &["backup", "--data", folder, copy]).status.success());
    assert_eq!(run(None, &["backup", "--data", folder, copy]).status.code(), Some(1), "nothing is overwritten");
    assert!(run(None, &["verify", "--store", &format!("sqlite:{copy}")]).status.success());
    assert_eq!(run(None, &["verify", "--store", "sqlite:/nowhere/x.db"]).status.code(), Some(1));
    assert_eq!(run(None, &["verify", "--store", "mysql://x"]).status.code(), Some(6));
    server.stop();
    // Damage done behind the owner's back is found, and the exit code says so.
    let damaged = rusqlite::Connection::open(store(data.path())).unwrap();
    damaged.execute("update scratchpad set value = '99' where key = 'made'", []).unwrap();
    drop(damaged);
    let output = run(None, &["verify", "--data", folder]);
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    assert!(stdout(&output).contains("variable_differs"), "{}", stdout(&output));
}

#[test]
fn a_server_that_is_not_there_is_named() {
    // Bound and let go of at once: nobody listens there.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let output = run(Some(&format!("http://{free}")), &["list"]);
    assert_eq!(output.status.code(), Some(7));
    assert!(stderr(&output).contains("steadfast dev"), "{}", stderr(&output));
}

#[test]
fn only_loopback_is_listened_on() {
    let data = tempfile::tempdir().unwrap();
    let folder = data.path().to_str().unwrap();
    let output = run(None, &["serve", "--data", folder, "--listen", "0.0.0.0:0"]);
    assert_eq!(output.status.code(), Some(6), "{}", stderr(&output));
    assert!(stderr(&output).contains("loopback"), "{}", stderr(&output));
}

fn serve_admits_without_definitions_and_runs_samples_when_asked(database: Database) {
    let mut command = Command::new(binary());
    command.args(["serve", "--store", &database.url()]);
    let server = Server::start_on(command);
    let output = run(Some(&server.url), &["start", "hello", "--id", "a"]);
    assert!(output.status.success() && stderr(&output).contains("no worker"), "{}", stderr(&output));
    server.stop();
    let mut command = Command::new(binary());
    command.args(["serve", "--samples", "--store", &database.url()]);
    let server = Server::start_on(command);
    let output = run(Some(&server.url), &["start", "hello", "--id", "a", "--wait"]);
    assert!(stdout(&output).contains(r#""steps":3"#), "it runs now: {}", stdout(&output));
    server.stop();
}

/// Far more kills than a step has deliveries: every row is judged all the same.
#[test]
fn the_demo_survives_more_kills_than_rows() {
    let data = tempfile::tempdir().unwrap();
    let folder = data.path().join("new");
    let output = run(None, &["demo", "--rows", "40", "--kills", "60", "--json", "--data", folder.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    let report = json(&stdout(&output));
    assert_eq!((&report["completed"], &report["lost"]), (&Value::from(40), &Value::from(0)), "{report}");
}

#[test]
fn the_demo_proves_itself() {
    let data = tempfile::tempdir().unwrap();
    let folder = data.path().join("new");
    let args = ["demo", "--rows", "1500", "--kills", "2", "--json", "--data", folder.to_str().unwrap()];
    let output = run(None, &args);
    assert!(output.status.success(), "{}", stderr(&output));
    let report = json(&stdout(&output));
    for (member, value) in
        [("rows", 1_500), ("workflows", 1_500), ("lost", 0), ("doubled", 0), ("faults", 0), ("kills", 2)]
    {
        assert_eq!(report[member], value, "{member}: {report}");
    }
    let (completed, failed) = (report["completed"].as_u64().unwrap(), report["failed"].as_u64().unwrap());
    assert_eq!(completed + failed, 1_500);
    let csv = std::fs::read_to_string(report["output"].as_str().unwrap()).unwrap();
    assert_eq!(csv.lines().count() as u64, completed + 1, "a line for each, and the heading");
    let again = run(None, &args);
    assert_eq!(again.status.code(), Some(1), "a folder that is not empty is refused");
    assert!(stderr(&again).contains("not empty"), "{}", stderr(&again));
}
