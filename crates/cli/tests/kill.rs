//! The real binary, a real file and a real PostgreSQL, SIGKILL at random moments.
//!
//! Clients start workflows over HTTP from several tasks while the server is killed and started again. What was
//! acknowledged must be there and finish; nothing may be committed twice, get stuck, or be there unasked.
//!
//! `STEADFAST_KILL_CYCLES` sets how often it is killed; 20 unless said otherwise.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{STUCK, Server, store as file};
use serde_json::{Value, json};
use steadfast::core::event::Event;
use steadfast::core::state::Status;
use steadfast::core::text::Namespace;
use steadfast::store::postgres::PostgresReader;
use steadfast::store::sqlite::SqliteReader;
use steadfast::store::{Filter, Reader};
use steadfast_pgtest::{Shared, shared};
use tempfile::TempDir;

const CLIENTS: u64 = 6;

const FLIGHT: &str = "2013,1,1,517,515,2,830,819,11,UA,1545,N14228,EWR,IAH,227,1400,5,15,2013-01-01T10:00:00Z";

/// A random number below `n`, from the system.
fn below(n: u64) -> u64 {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).expect("the system has random numbers");
    u64::from_be_bytes(bytes) % n
}

/// What one start asks for, from its number alone, so that a repeat asks for the same.
fn request(id: &str, n: u64) -> Value {
    match n % 4 {
        0 => json!({"name": "hello", "id": id, "input": {"steps": 1 + n % 7}}),
        1 => json!({"name": "flaky", "id": id, "input": {"failures": n % 3}}),
        2 => json!({"name": "sleeper", "id": id, "input": {"seconds": 0.02, "times": 2}}),
        // With its line: looking a row up unpacks the whole year first, which takes longer than these processes live.
        _ => json!({"name": "flight", "id": id, "input": {"row": n, "line": FLIGHT}}),
    }
}

/// What the callers know.
#[derive(Default)]
struct Known {
    /// Answered as accepted.
    acknowledged: BTreeMap<String, u64>,
    /// Sent, and the answer was lost.
    unknown: BTreeMap<String, u64>,
}

async fn client(url: String, cycle: u64, client: u64, known: Arc<Mutex<Known>>, stop: Arc<AtomicBool>) {
    let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(10)).build().unwrap();
    let mut count = 0;
    while !stop.load(Ordering::SeqCst) {
        count += 1;
        let n = cycle * 10_000 + client * 1_000 + count % 1_000;
        let id = format!("k{cycle}-{client}-{count}");
        let sent = http.post(format!("{url}/v1/workflows")).json(&request(&id, n)).send().await;
        let mut known = known.lock().unwrap();
        match sent {
            Ok(response) if response.status().is_success() => drop(known.acknowledged.insert(id, n)),
            // Refused for now (overloaded): nothing is there, and nothing is owed.
            Ok(response) if response.status() == 429 => {}
            Ok(_) | Err(_) => drop(known.unknown.insert(id, n)),
        }
    }
}

/// Where the server keeps its store.
enum Store {
    File(TempDir),
    Postgres { url: String, _shared: Shared },
}

impl Store {
    fn dev(&self) -> Server {
        match self {
            Self::File(data) => Server::dev(data.path()),
            Self::Postgres { url, .. } => Server::dev_on(url),
        }
    }

    fn reader(&self) -> Box<dyn Reader> {
        match self {
            Self::File(data) => Box::new(SqliteReader::open(file(data.path())).unwrap()),
            Self::Postgres { url, .. } => Box::new(PostgresReader::open(url).unwrap()),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_random_moments_nothing_is_lost_doubled_or_stuck_in_a_file() {
    killed_at_random_moments_nothing_is_lost_doubled_or_stuck(&Store::File(tempfile::tempdir().unwrap())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_random_moments_nothing_is_lost_doubled_or_stuck_in_postgres() {
    let shared = shared();
    let store = Store::Postgres { url: shared.fresh_url(), _shared: shared };
    killed_at_random_moments_nothing_is_lost_doubled_or_stuck(&store).await;
}

async fn killed_at_random_moments_nothing_is_lost_doubled_or_stuck(store: &Store) {
    let cycles: u64 = std::env::var("STEADFAST_KILL_CYCLES").ok().and_then(|text| text.parse().ok()).unwrap_or(20);
    let known = Arc::new(Mutex::new(Known::default()));
    let mut slowest_start = Duration::ZERO;
    for cycle in 0..cycles {
        let begin = Instant::now();
        let server = store.dev();
        slowest_start = slowest_start.max(begin.elapsed());
        let stop = Arc::new(AtomicBool::new(false));
        let clients: Vec<_> = (0..CLIENTS)
            .map(|n| tokio::spawn(client(server.url.clone(), cycle, n, known.clone(), stop.clone())))
            .collect();
        tokio::time::sleep(Duration::from_millis(20 + below(300))).await;
        server.kill();
        stop.store(true, Ordering::SeqCst);
        for client in clients {
            client.await.unwrap();
        }
    }

    // The truth about what was left open: sent again, every one is accepted, as new or as a replay.
    let server = store.dev();
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let unknown = known.lock().unwrap().unknown.clone();
    let (mut replays, asked) = (0, unknown.len());
    for (id, n) in unknown {
        let response = http.post(format!("{}/v1/workflows", server.url)).json(&request(&id, n)).send().await.unwrap();
        assert!(response.status().is_success(), "{id}: {}", response.status());
        let answer: Value = response.json().await.unwrap();
        replays += usize::from(answer["replay"] == true);
        known.lock().unwrap().acknowledged.insert(id, n);
    }
    let acknowledged = known.lock().unwrap().acknowledged.clone();
    assert!(acknowledged.len() as u64 >= cycles, "there was load: {}", acknowledged.len());

    // Nothing is stuck: everything ends soon after the last start.
    let reader = store.reader();
    let reader = &*reader;
    let begin = Instant::now();
    loop {
        let live: Vec<String> = heads(reader)
            .into_iter()
            .filter(|(_, status)| !status.is_terminal())
            .map(|(id, status)| format!("{id} {}", status.label()))
            .collect();
        if live.is_empty() {
            break;
        }
        assert!(begin.elapsed() < STUCK, "{} are stuck: {:?}", live.len(), &live[..live.len().min(10)]);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    server.stop();

    let found: BTreeMap<String, Status> = heads(reader).into_iter().collect();
    for id in acknowledged.keys() {
        assert!(found.contains_key(id), "{id} was acknowledged and is lost");
    }
    for id in found.keys() {
        assert!(acknowledged.contains_key(id), "{id} is there and nobody knows of it");
    }
    let mut redelivered = 0;
    for (id, n) in &acknowledged {
        redelivered += examine(reader, id, *n, found[id]);
    }
    let verified = reader.verify(&mut |_| {}).unwrap();
    assert_eq!(verified.faults, [], "verify is clean");
    println!(
        "{cycles} kills, {} workflows, {} events, {asked} unknown starts of which {replays} had happened, \
         {redelivered} steps redelivered, slowest start {slowest_start:?}",
        verified.workflows, verified.events
    );
}

fn heads(reader: &dyn Reader) -> Vec<(String, Status)> {
    let (mut heads, mut before) = (Vec::new(), None);
    loop {
        let page = reader.list(&Filter::all(Namespace::default_namespace()), before, 1_000).unwrap();
        heads.extend(page.items.iter().map(|item| (item.head.key.id.to_string(), item.head.status())));
        before = page.next;
        if before.is_none() {
            return heads;
        }
    }
}

/// Holds one log against what was asked for; answers how many of its steps were handed out again.
fn examine(reader: &dyn Reader, id: &str, n: u64, status: Status) -> usize {
    let key = steadfast::core::text::WorkflowKey {
        namespace: Namespace::default_namespace(),
        id: steadfast::core::text::WorkflowId::trusted(id),
    };
    let log = reader.events(&key, 0, usize::MAX).unwrap();
    let (mut commits, mut counted, mut given_back, mut starts) = (0, 0, 0, 0);
    let mut visits = BTreeSet::new();
    let mut visit_of_start = 0;
    for logged in &log {
        match &logged.event {
            Event::StepStarted { visit, .. } => {
                starts += 1;
                visit_of_start = *visit;
            }
            Event::StepCompleted { .. } => {
                commits += 1;
                assert!(visits.insert(visit_of_start), "{id}: visit {visit_of_start} was committed twice");
            }
            Event::StepFailed { counts: true, .. } => counted += 1,
            Event::StepFailed { code, .. } => {
                assert_eq!(code.as_str(), "given_back", "{id}: nobody waited for a lease");
                given_back += 1;
            }
            _ => {}
        }
    }
    assert_eq!(starts, commits + counted + given_back, "{id}: every start has one outcome");
    let request = request(id, n);
    let expected = match request["name"].as_str().unwrap() {
        "hello" => (request["input"]["steps"].as_u64().unwrap(), 0, Status::Completed),
        "flaky" => (1, request["input"]["failures"].as_u64().unwrap(), Status::Completed),
        "sleeper" => (3, 0, Status::Completed),
        _ => (3, 0, Status::Completed),
    };
    assert_eq!((commits, counted, status), expected, "{id}: {request}");
    given_back as usize
}
