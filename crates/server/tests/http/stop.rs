//! Stop: nothing new, and what was begun may finish.

use std::time::{Duration, Instant};

use steadfast_pgtest::{Database, on_each_database};
use steadfast_server::Options;
use tokio::net::TcpStream;

use crate::site::{PATIENCE, Site, options};

on_each_database! {
    #[tokio::test] async:
    requests_in_flight_finish_and_new_ones_are_not_taken,
    who_waits_is_told_to_come_again,
    connections_that_ask_nothing_delay_no_stop,
    after_the_grace_requests_are_cut,
}

const LONG: Duration = Duration::from_secs(600);

async fn requests_in_flight_finish_and_new_ones_are_not_taken(database: Database) {
    let mut site = Site::idle(&database, Options { grace: LONG, ..options() }).await;
    let address = site.address;
    let mut raw = site.connect().await;
    raw.send("POST /v1/workflows HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nexpect: 100-continue\r\ncontent-length: 24\r\n\r\n")
        .await;
    // The server asks for the body, so the request is in its hands.
    raw.read_until("100 Continue\r\n\r\n").await;
    site.stop();
    // The listener is gone: that the stop was heard shows in the refusal.
    while TcpStream::connect(address).await.is_ok() {
        tokio::task::yield_now().await;
    }
    raw.send(r#"{"name":"echo","id":"a"}"#).await;
    let answer = raw.read_to_end().await;
    assert!(answer.starts_with("HTTP/1.1 201 "), "{answer}");
    assert!(answer.to_lowercase().contains("connection: close"), "{answer}");
    let engine = site.engine.clone();
    site.stopped().await;
    assert_eq!(engine.head("a").await.unwrap().name.as_str(), "echo", "the engine goes on");
}

async fn who_waits_is_told_to_come_again(database: Database) {
    let mut site = Site::new(&database).await;
    site.start(r#"{"name":"hold","id":"a"}"#).await;
    site.door.entered().await;
    let mut raw = site.connect().await;
    raw.send("GET /v1/workflows/a/result?wait_ms=60000 HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    // The connection is counted once its request is read.
    while !site.get("/metrics").await.body.contains("\nsteadfast_http_connections 2\n") {}
    let began = Instant::now();
    site.stop();
    let answer = raw.read_to_end().await;
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 202 "), "{answer}");
    site.stopped().await;
    assert!(began.elapsed() < PATIENCE);
}

async fn connections_that_ask_nothing_delay_no_stop(database: Database) {
    let mut site = Site::new(&database).await;
    let silent = site.connect().await;
    let mut half = site.connect().await;
    half.send("GET /healthz HTT").await;
    let mut resting = site.connect().await;
    resting.send("GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    resting.read_until("true}").await;
    let began = Instant::now();
    site.stop();
    site.stopped().await;
    assert!(began.elapsed() < Duration::from_secs(4), "the grace was waited out: {:?}", began.elapsed());
    drop((silent, half, resting));
}

async fn after_the_grace_requests_are_cut(database: Database) {
    let mut site = Site::idle(&database, Options { grace: Duration::from_millis(200), ..options() }).await;
    let mut raw = site.connect().await;
    raw.send("POST /v1/workflows HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nexpect: 100-continue\r\ncontent-length: 24\r\n\r\n")
        .await;
    raw.read_until("100 Continue\r\n\r\n").await;
    site.stop();
    assert_eq!(raw.read_to_end().await, "");
    site.stopped().await;
}
