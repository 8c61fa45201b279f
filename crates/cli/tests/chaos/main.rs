//! Chaos: real nodes on a real PostgreSQL, under load, while everything around them fails.
//!
//! Three processes of the real binary share one store. Callers ask for everything there is, over HTTP, and repeat what
//! was not answered. Meanwhile nodes are killed, the database is killed, restarted, frozen, locked, failed over, cut
//! off. Afterwards nothing that was acknowledged is lost, nothing that was refused is there, nothing is there twice, and
//! nothing is stuck.
//!
//! ```text
//! nodes   processes of the real binary      caller  a client that repeats     jobs    what is asked for
//! site    the database and its faults       ledger  what callers know         found   what is in the store
//! scene   load, faults, verdict             faults  faults, and plans by seed judge   ledger against store
//! planted damage by hand, which is found
//! ```
//!
//! `STEADFAST_CHAOS_SEED` repeats a plan, `STEADFAST_CHAOS_SECONDS` lengthens the mixed scenario.

#[path = "../common/mod.rs"]
mod common;

mod caller;
mod chance;
mod faults;
mod found;
mod jobs;
mod judge;
mod ledger;
mod nodes;
mod planted;
mod scene;
mod site;

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use steadfast_pgtest::Bouncer;

use faults::{Fault, plan};
use ledger::Asked;
use scene::Scene;
use site::Site;

/// The seed asked for, or a random one.
fn seed() -> u64 {
    let asked = std::env::var("STEADFAST_CHAOS_SEED").ok();
    asked.map(|text| text.parse().expect("STEADFAST_CHAOS_SEED is a number")).unwrap_or_else(|| {
        let mut bytes = [0; 8];
        getrandom::fill(&mut bytes).expect("the system has random numbers");
        u64::from_be_bytes(bytes) % 1_000_000_000
    })
}

/// Inflicts faults one after the other on nodes that reach the database by this URL.
fn scenario(name: &'static str, site: Site, url: String, faults: impl IntoIterator<Item = Fault>) {
    let mut site = site;
    let mut scene = Scene::begin(name, &url, seed());
    for fault in faults {
        // Something else may have taken the processor away for a while, which it does not do twice in a row.
        let back = (0..2).any(|_| {
            scene.harm(fault.to_string(), |nodes| site.inflict(fault, nodes));
            scene.is_back_in_time(&site.url())
        });
        assert!(back, "twice after {fault} the rate was not back in time");
        scene.rest(0..500);
    }
    scene.end(&site, &[site.url(), url]);
}

#[test]
fn nodes_are_killed() {
    let site = Site::make();
    let url = site.url();
    let kills = (0..7).map(|n| Fault::KillNode { node: n % 3, down_ms: [10, 600, 1_200][n / 3 % 3] });
    scenario("nodes killed", site, url, kills);
}

/// A rolling restart: whoever asked a node that was told to stop is answered, or answered by the next node that he asks;
/// what runs there ends.
#[test]
fn nodes_are_replaced_one_by_one() {
    let site = Site::make();
    let url = site.url();
    let mut scene = Scene::begin("rolling restart", &url, seed());
    for n in 0..3 {
        let mut drained = None;
        // Some of them are under way on this node, and go on elsewhere.
        scene.start("long", &Asked::new("hello", serde_json::json!({"steps": 240})), 6);
        scene.harm(format!("node {n} replaced"), |nodes| {
            drained = Some(nodes.drain(n));
            nodes.start_again(n);
        });
        let (took, said) = drained.expect("it was drained");
        println!("node {n}: {:.2} s, {said:?}", took.as_secs_f64());
        assert!(said.starts_with("stopped after ") && said.ends_with(": every running step has ended"), "{said}");
        // Requests have 5 s, steps 10 s.
        assert!(took < Duration::from_secs(15), "a drain took {took:?}");
        scene.rest(1_200..1_700);
    }
    let ledger = scene.ledger.clone();
    scene.end(&site, std::slice::from_ref(&url));
    assert!(ledger.tally.sent_most.load(Ordering::Relaxed) <= 2, "a request failed at two nodes: {:?}", ledger.tally);
    let found = found::Found::read(&url);
    let taken = found.logs.values().flatten().filter(|event| {
        event.kind == "step_failed"
            && ["given_back", "lease_lost"].contains(&event.payload["code"].as_str().unwrap_or(""))
    });
    assert_eq!(taken.count(), 0, "a step was taken from a node that was told to stop");
    let workers = |log: &Vec<found::Event>| {
        let starts = log.iter().filter(|event| event.kind == "step_started");
        starts.map(|event| event.payload["worker"].to_string()).collect::<BTreeSet<_>>().len()
    };
    assert!(found.logs.values().any(|log| workers(log) > 1), "nothing ran where a node was told to stop");
}

#[test]
fn the_database_is_restarted_at_once() {
    let site = Site::make();
    let url = site.url();
    let faults = [Fault::Restart, Fault::KillServer { down_ms: 1_500 }, Fault::Restart];
    scenario("database restarted", site, url, faults);
}

#[test]
fn connections_are_terminated() {
    let site = Site::make();
    let url = site.url();
    scenario("connections terminated", site, url, [Fault::Terminate { times: 16 }]);
}

#[test]
fn a_standby_takes_over() {
    let mut site = Site::with_standby();
    let url = site.url_of_both();
    let mut scene = Scene::begin("failover", &url, seed());
    let before = found::epoch(&site.url());
    scene.harm("failover", |_| site.fail_over_for_good());
    scene.rest(1_000..2_000);
    scene.harm("a node killed after it", |nodes| site.inflict(Fault::KillNode { node: 0, down_ms: 100 }, nodes));
    let after = found::epoch(&site.url());
    scene.end(&site, &[site.url(), url]);
    assert_eq!(after, before + 1, "the epoch is raised once");
}

/// Commits wait for a standby that lags when their connections are cut, and their server dies before it has caught up:
/// what only the dead one had was told to nobody.
#[test]
fn a_standby_that_lags_takes_over() {
    let mut site = Site::with_standby();
    let url = site.proxy.url("");
    let mut scene = Scene::begin("lagging standby", &url, seed());
    scene.harm("failover to a standby that lagged", |_| site.fail_over_to_one_that_lags());
    scene.end(&site, &[site.url(), url]);
}

#[test]
fn commits_are_cut_off() {
    let site = Site::make();
    // A proxy changes ports, as a pooler does, and keeps what is prepared.
    let url = site.proxy.url("prepared=on");
    let faults = (0..6).map(|n| if n % 2 == 0 { Fault::CutBefore { cuts: 10 } } else { Fault::CutAfter { cuts: 10 } });
    scenario("commits cut", site, url, faults);
}

#[test]
fn the_network_stands_still() {
    let site = Site::make();
    let url = site.proxy.url("");
    scenario("network stalled", site, url, [Fault::Stall { ms: 1_000 }, Fault::Stall { ms: 4_000 }]);
}

#[test]
fn the_server_stands_still() {
    let site = Site::make();
    let url = site.url();
    scenario("server frozen", site, url, [Fault::Freeze { ms: 1_000 }, Fault::Freeze { ms: 4_000 }]);
}

#[test]
fn somebody_holds_the_rows() {
    let site = Site::make();
    let url = site.url();
    scenario("rows locked", site, url, [Fault::Lock { ms: 8_000 }]);
}

#[test]
fn the_database_takes_no_writes() {
    let site = Site::make();
    let url = site.url();
    scenario("read-only", site, url, [Fault::ReadOnly { ms: 500 }, Fault::ReadOnly { ms: 4_000 }]);
}

/// Nodes are killed while nobody can write: what they held is taken up when the database and they are back.
#[test]
fn nodes_are_killed_while_the_database_takes_no_writes() {
    let site = Site::make();
    let url = site.url();
    let mut scene = Scene::begin("killed while read-only", &url, seed());
    scene.start("long", &Asked::new("hello", serde_json::json!({"steps": 240})), 6);
    scene.harm("two nodes killed while read-only", |nodes| {
        site.primary.sql("alter system set default_transaction_read_only = on; select pg_reload_conf()");
        // Connections that are there hear of it.
        let begin = Instant::now();
        while site.primary.sql("show default_transaction_read_only") != "on" {
            assert!(begin.elapsed() < common::STUCK, "it is not read-only");
            std::thread::sleep(Duration::from_millis(20));
        }
        (0..2).for_each(|n| nodes.kill(n));
        let held = "select count(*) from steadfast.heads where status = 'running'";
        assert_ne!(site.primary.sql(held), "0", "they held something");
        site.primary.sql("alter system reset default_transaction_read_only; select pg_reload_conf()");
        (0..2).for_each(|n| nodes.start_again(n));
    });
    scene.end(&site, &[url]);
}

#[test]
fn there_are_no_slots() {
    let site = Site::make();
    let url = site.url();
    scenario("slots exhausted", site, url, [Fault::Exhaust { ms: 4_000 }]);
}

#[test]
fn through_a_pooler() {
    let site = Site::make();
    let bouncer = Bouncer::start(site.primary.port());
    let url = bouncer.url("");
    let faults = [
        Fault::KillNode { node: 1, down_ms: 300 },
        Fault::Terminate { times: 4 },
        Fault::KillNode { node: 2, down_ms: 20 },
        Fault::Restart,
    ];
    scenario("through a pooler", site, url, faults);
}

/// Everything together, in an order that the seed decides.
#[test]
fn mixed_by_seed() {
    let seconds = std::env::var("STEADFAST_CHAOS_SECONDS").ok();
    let seconds = seconds.map_or(15, |text| text.parse().expect("STEADFAST_CHAOS_SECONDS is a number"));
    let mut site = Site::with_standby();
    let seed = seed();
    let url = site.proxy.url(if seed.is_multiple_of(2) { "prepared=on" } else { "" });
    let mut scene = Scene::begin("mixed", &url, seed);
    let begin = Instant::now();
    for (pause, fault) in plan(scene.seed(), 3) {
        std::thread::sleep(pause);
        if begin.elapsed() > Duration::from_secs(seconds) {
            break;
        }
        println!("{:6.1} s {fault}", begin.elapsed().as_secs_f64());
        scene.harm(fault.to_string(), |nodes| site.inflict(fault, nodes));
    }
    scene.end(&site, &[site.url(), url]);
}
