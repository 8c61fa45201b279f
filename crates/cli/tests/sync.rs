//! A disk that fails at the commit: the real binary under `strace`, which lets `fdatasync` fail.
//!
//! The frames of a commit whose sync failed are in the log file and may or may not survive. The caller must hear
//! *unknown*, nobody may read what is not durable, and the same id sent again must tell the truth.
//!
//! About SQLite, whose syncs are ours; PostgreSQL makes its own.

mod common;

use std::process::Command;
use std::time::Duration;

use common::{STUCK, Server, binary, store};
use serde_json::{Value, json};
use steadfast::store::Reader;
use steadfast::store::sqlite::SqliteReader;

/// Only starts commit: a failed sync meets one of them.
#[tokio::test(flavor = "multi_thread")]
async fn a_start_whose_sync_fails_is_answered_as_unknown_and_resolved_by_its_id() {
    let unknown = fail_syncs("serve", false).await;
    assert!(unknown >= 1, "a start met the failing sync");
}

/// Steps commit too: their workers ask again until they know, and no handler's result is lost.
#[tokio::test(flavor = "multi_thread")]
async fn steps_whose_sync_fails_are_committed_once_all_the_same() {
    fail_syncs("dev", true).await;
}

/// Starts workflows while some syncs fail; answers how many starts were answered as unknown.
async fn fail_syncs(verb: &str, run: bool) -> usize {
    let data = tempfile::tempdir().unwrap();
    let mut command = Command::new("strace");
    command
        .args(["-f", "-qq", "-o"])
        .arg(data.path().join("strace.log"))
        // The first syncs belong to opening and migrating; a few commits pass, then three fail, then all is well.
        .args(["-e", "trace=fdatasync,fsync", "-e", "inject=fdatasync,fsync:error=EIO:when=30..32"])
        .arg(binary())
        .arg(verb);
    let server = Server::start(command, data.path());
    let http = reqwest::Client::builder().no_proxy().timeout(STUCK).build().unwrap();
    let start = |n: u32| {
        let body = json!({"name": "hello", "id": format!("s-{n}"), "input": {"steps": 2}});
        http.post(format!("{}/v1/workflows", server.url)).json(&body).send()
    };
    let mut unknown = Vec::new();
    for n in 0..60 {
        let response = start(n).await.unwrap();
        let status = response.status();
        let answer: Value = response.json().await.unwrap();
        if status == 503 {
            assert_eq!(answer["code"], "outcome_unknown", "{answer}");
            assert_eq!(answer["id"], format!("s-{n}"), "the answer says which id to repeat");
            unknown.push(n);
        } else {
            assert!(status.is_success(), "{n}: {answer}");
        }
    }
    let injected = std::fs::read_to_string(data.path().join("strace.log")).unwrap().matches("(INJECTED)").count();
    assert!(injected >= 1, "a sync was made to fail");
    for n in &unknown {
        let response = start(*n).await.unwrap();
        assert!(response.status().is_success(), "{n}: {}", response.status());
    }
    for n in (0..60).filter(|_| run) {
        let url = format!("{}/v1/workflows/s-{n}/result?wait_ms=30000", server.url);
        let answer: Value = http.get(url).send().await.unwrap().json().await.unwrap();
        assert_eq!(answer["status"], "completed", "s-{n}: {answer}");
    }
    // The traced process, not the tracer: its pid stands in its lock.
    let pid = std::fs::read_to_string(data.path().join("steadfast.db.lock")).unwrap();
    let pid = rustix::process::Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    drop(server);
    tokio::time::sleep(Duration::from_millis(50)).await;
    let verified = SqliteReader::open(store(data.path())).unwrap().verify(&mut |_| {}).unwrap();
    assert_eq!((verified.faults, verified.workflows), (vec![], 60));
    println!("{injected} syncs failed, {} starts were answered as unknown", unknown.len());
    unknown.len()
}
