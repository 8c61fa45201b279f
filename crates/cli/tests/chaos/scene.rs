//! Scene: nodes under load, from the first request to the verdict.

use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use reqwest::Method;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use crate::caller::Caller;
use crate::chance::Chance;
use crate::common::{STUCK, binary, stderr, stdout};
use crate::found::{self, Found};
use crate::jobs::Deck;
use crate::judge::{Verdict, judge};
use crate::ledger::{Asked, Ledger, Standing};
use crate::nodes::Nodes;
use crate::site::Site;

const CALLERS: u64 = 8;
/// How often a caller begins a job: callers that waited do not make up for it, and every job has its share of any few
/// dozen, so that the load is the same before and after a fault.
const PACE: Duration = Duration::from_millis(100);
/// The load without a fault, after a moment to warm up.
const WARM: Duration = Duration::from_millis(1_000);
const CALM: Duration = Duration::from_millis(2_500);
/// What the promise is.
const RECOVERY: Duration = Duration::from_secs(5);
/// What is waited for at the end: other tests may take the processor away for a while.
const RECOVERY_MAX: Duration = Duration::from_secs(20);
/// How many workflows are looked at over HTTP at the end.
const SAMPLE: usize = 60;

/// Milliseconds since the epoch, which is also what the database's clock tells: it is on this machine.
fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("it is after 1970");
    i64::try_from(since.as_millis()).expect("it is before the end of time")
}

pub struct Scene {
    name: &'static str,
    seed: u64,
    began: Instant,
    pub nodes: Arc<Nodes>,
    pub ledger: Arc<Ledger>,
    stop: Arc<AtomicBool>,
    callers: Vec<JoinHandle<()>>,
    runtime: Runtime,
    chance: Chance,
    /// The time without a fault.
    calm: (i64, i64),
    healed: Vec<Healed>,
    /// Which process each node must still be.
    pids: Vec<Option<i32>>,
}

/// Something that was inflicted.
struct Healed {
    what: String,
    begin: i64,
    /// When everything was well again.
    end: i64,
}

impl Scene {
    /// Starts three nodes of the store and the load on them, and lets them run for a while.
    pub fn begin(name: &'static str, store: &str, seed: u64) -> Self {
        println!("chaos {name}: seed {seed}");
        let nodes = Arc::new(Nodes::start(store, 3));
        let (ledger, stop) = (Arc::new(Ledger::default()), Arc::new(AtomicBool::new(false)));
        let runtime = Runtime::new().expect("a runtime for the callers");
        let chance = Chance::of(seed);
        let deck = Arc::new(Mutex::new(Deck::of(chance.apart(5))));
        let callers = (0..CALLERS)
            .map(|n| {
                let caller = Caller::new(format!("c{n}"), nodes.clone(), ledger.clone(), chance.apart(100 + n));
                runtime.spawn(call(caller, deck.clone(), stop.clone()))
            })
            .collect();
        let pids = nodes.pids();
        sleep(WARM);
        let from = now();
        sleep(CALM);
        let calm = (from, now());
        let began = Instant::now();
        let healed = Vec::new();
        let chance = chance.apart(2);
        Self { name, seed, began, nodes, ledger, stop, callers, runtime, chance, calm, healed, pids }
    }

    pub fn seed(&self) -> u64 {
        self.seed
    }

    pub fn rest(&mut self, millis: std::ops::Range<u64>) {
        sleep(self.chance.millis(millis));
    }

    /// Starts so many of these, beside the load.
    pub fn start(&mut self, job: &'static str, asked: &Asked, count: usize) {
        let name = format!("extra{}", self.healed.len());
        let mut caller = Caller::new(name, self.nodes.clone(), self.ledger.clone(), self.chance.apart(4));
        caller.job = job;
        for _ in 0..count {
            let id = caller.fresh_id();
            assert!(self.runtime.block_on(caller.start(&id, asked)), "{id} is accepted");
        }
    }

    /// Does some harm, after which everything is well again.
    pub fn harm(&mut self, what: impl Into<String>, harm: impl FnOnce(&Nodes)) {
        let (before, begin) = (self.nodes.pids(), now());
        harm(&self.nodes);
        self.healed.push(Healed { what: what.into(), begin, end: now() });
        // Those that the harm has killed are other processes from now on.
        for (n, pid) in self.nodes.pids().into_iter().enumerate() {
            if pid != before[n] {
                self.pids[n] = pid;
            }
        }
    }

    /// The rate of finished workflows before the first fault, by the second.
    fn rate(&self, ends: &[i64]) -> f64 {
        let (from, to) = self.calm;
        let count = ends.iter().filter(|at| (from..to).contains(*at)).count();
        count as f64 / ((to - from) as f64 / 1_000.0)
    }

    /// For each fault how long after it the rate was 90 % of that before; of those that the next one left no time to
    /// recover nothing is said.
    fn recoveries(&self, ends: &[i64], until: i64) -> Vec<(&str, Option<Duration>)> {
        let wanted = self.rate(ends) * 0.9;
        let next = self.healed.iter().skip(1).map(|healed| Some(healed.begin)).chain([None]);
        let each = self.healed.iter().zip(next).filter_map(|(healed, next)| {
            let time = recovery(ends, wanted, healed.end, next.unwrap_or(until));
            (time.is_some() || next.is_none()).then_some((healed.what.as_str(), time))
        });
        each.collect()
    }

    /// Waits until the rate is what it was before the first fault, no longer than was promised.
    pub fn is_back_in_time(&self, url: &str) -> bool {
        let last = self.healed.last().expect("something was inflicted");
        loop {
            let (ends, until) = (found::ends(url), now());
            match recovery(&ends, self.rate(&ends) * 0.9, last.end, until) {
                Some(time) if time <= RECOVERY => return true,
                // The second in which so many end begins in time and is over later.
                None if until - last.end <= 1_000 + i64::try_from(RECOVERY.as_millis()).expect("it is short") => {}
                _ => {
                    println!("late: after {} the rate was not back in {} s", last.what, RECOVERY.as_secs());
                    return false;
                }
            }
            sleep(Duration::from_millis(200));
        }
    }

    /// Goes on until the rate is what it was, or for as long as that may take.
    fn wait_for_recovery(&self, url: &str) {
        let begin = Instant::now();
        sleep(Duration::from_millis(2_500));
        while self.recoveries(&found::ends(url), now()).iter().any(|(_, time)| time.is_none())
            && begin.elapsed() < RECOVERY_MAX
        {
            sleep(Duration::from_millis(500));
        }
    }

    /// Ends the load and waits for the last workflow. How long that took.
    pub fn settle(&mut self, url: &str) -> Duration {
        self.stop.store(true, Ordering::SeqCst);
        for caller in std::mem::take(&mut self.callers) {
            self.runtime.block_on(caller).expect("a caller answers for all that it asked");
        }
        self.drain(url)
    }

    /// Ends the load, waits for the last workflow, and judges. `urls` are those by which `verify` looks.
    pub fn end(mut self, site: &Site, urls: &[String]) {
        let url = site.url();
        self.wait_for_recovery(&url);
        let until = now();
        let took = self.began.elapsed();
        let drained = self.settle(&url);
        let found = Found::read(&url);
        let mut verdict = judge(&self.ledger, &found);
        self.look(&found, &mut verdict);
        verify(urls, &mut verdict);
        self.look_after_processes(&mut verdict);
        let ends = found::ends(&url);
        let (rate, recoveries) = (self.rate(&ends), self.recoveries(&ends, until));
        println!("{}", self.report(site, &verdict, &found, took, drained, rate, &recoveries));
        assert!(verdict.is_clean(), "{}\n{}\n{}", verdict, verdict.findings(), self.nodes.log_tails());
        assert!(rate > 5.0, "there was load: {rate:.1} workflows a second");
        for (what, recovery) in recoveries {
            assert!(recovery.is_some_and(|time| time <= RECOVERY_MAX), "after {what} the rate never was what it was");
        }
    }

    #[allow(clippy::too_many_arguments, reason = "a line has many figures")]
    fn report(
        &self,
        site: &Site,
        verdict: &Verdict,
        found: &Found,
        took: Duration,
        drained: Duration,
        rate: f64,
        recoveries: &[(&str, Option<Duration>)],
    ) -> String {
        let tally = &self.ledger.tally;
        let n = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
        let accepted = self.ledger.starts().values().filter(|start| start.standing == Standing::Accepted).count();
        let slowest = recoveries.iter().max_by_key(|(_, time)| time.unwrap_or(Duration::MAX));
        let back = slowest.map_or("no fault".to_owned(), |(what, time)| match time {
            Some(time) => {
                let late = if *time > RECOVERY { " (LATE)" } else { "" };
                format!("back to 90 % of {rate:.0}/s in at most {:.2} s{late} (after {what})", time.as_secs_f64())
            }
            None => format!("NOT back to 90 % of {rate:.0}/s after {what}"),
        });
        format!(
            "chaos {}: {verdict}; {} operations ({accepted} workflows accepted, {} replays, {} conflicts, {} cancels, \
             {} signals), \
             {} attempts unknown, {} refused for now; {} events, {} steps redelivered; {} kills, {} cuts, {} restarts, \
             {} connections terminated, {} failovers; {back}; the last workflow ended after {:.1} s; {:.0} s, seed {}",
            self.name,
            n(&tally.answers),
            n(&tally.replays),
            n(&tally.conflicts),
            n(&tally.cancels),
            n(&tally.signals),
            n(&tally.unknown),
            n(&tally.not_now),
            found.events(),
            verdict.redelivered,
            site.inflicted.kills,
            site.proxy.cuts(),
            site.inflicted.restarts,
            site.inflicted.terminated,
            site.inflicted.failovers,
            drained.as_secs_f64(),
            took.as_secs_f64(),
            self.seed,
        )
    }

    /// Only those that were killed here may be others than at the beginning.
    pub fn look_after_processes(&self, verdict: &mut Verdict) {
        for n in self.nodes.ended() {
            verdict.wrong(&format!("node {n}"), "it has ended by itself");
        }
        if self.nodes.pids() != self.pids {
            verdict.wrong("nodes", format!("they are {:?} and were {:?}", self.nodes.pids(), self.pids));
        }
        let panics = self.nodes.log_lines_with("panicked");
        if panics > 0 {
            verdict.wrong("nodes", format!("{panics} lines of their logs tell of a panic"));
        }
    }

    /// Waits until no workflow is live; what is live after long is stuck, as the verdict will say.
    fn drain(&self, url: &str) -> Duration {
        let begin = Instant::now();
        while begin.elapsed() < STUCK && found::live(url) != Ok(0) {
            sleep(Duration::from_millis(50));
        }
        begin.elapsed()
    }

    /// Looks at some of the workflows over HTTP: every node tells what the store holds.
    pub fn look(&mut self, found: &Found, verdict: &mut Verdict) {
        let accepted: Vec<String> = {
            let starts = self.ledger.starts();
            let accepted = starts.iter().filter(|(_, start)| start.standing == Standing::Accepted);
            accepted.map(|(id, _)| id.clone()).collect()
        };
        let chance = self.chance.apart(3);
        let mut caller = Caller::new("look".to_owned(), self.nodes.clone(), self.ledger.clone(), chance);
        for id in accepted.iter().step_by((accepted.len() / SAMPLE).max(1)) {
            let Some(head) = found.head(id) else { continue };
            let told = self.runtime.block_on(async {
                let workflow = caller.ask(Method::GET, &format!("/v1/workflows/{id}"), None).await?.0;
                let events = caller.ask(Method::GET, &format!("/v1/workflows/{id}/events?limit=500"), None).await?.0;
                Some((workflow, events))
            });
            let Some((workflow, events)) = told else {
                verdict.stuck(id, "nobody can look at it");
                continue;
            };
            if workflow.status == 404 {
                verdict.lost(id, "it was acknowledged, and a look does not find it");
            } else if workflow.body["status"] != head.status.as_str() {
                verdict.wrong(id, format!("a look shows {} where the store holds {}", workflow.body, head.status));
            }
            let shown = events.body["events"].as_array().map_or(0, Vec::len);
            if shown != found.log(head.workflow).len() {
                verdict.wrong(id, format!("a look shows {shown} events"));
            }
        }
    }
}

/// Lets the product prove each workflow by its log, as it is seen by each of these URLs.
pub fn verify(urls: &[String], verdict: &mut Verdict) {
    for url in urls {
        let verify = Command::new(binary()).args(["verify", "--store", url]).output().expect("the binary runs");
        if !verify.status.success() {
            verdict.wrong("verify", format!("{}{}", stderr(&verify), stdout(&verify)));
        }
    }
}

/// A caller's life: a job at every tick.
async fn call(mut caller: Caller, deck: Arc<Mutex<Deck>>, stop: Arc<AtomicBool>) {
    let mut ticks = tokio::time::interval(PACE);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while !stop.load(Ordering::SeqCst) {
        ticks.tick().await;
        let n = caller.chance.next();
        let job = deck.lock().expect("nobody panics while drawing").draw();
        caller.job = job.name;
        (job.send)(&mut caller, n).await;
    }
}

/// How long after `from` a second begins in which so many end; none when there is no such second before `until`.
fn recovery(ends: &[i64], wanted: f64, from: i64, until: i64) -> Option<Duration> {
    (from..=until - 1_000)
        .step_by(50)
        .find(|at| {
            let before = |limit: i64| ends.partition_point(|end| *end < limit);
            (before(at + 1_000) - before(*at)) as f64 >= wanted
        })
        .map(|at| Duration::from_millis((at - from).unsigned_abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recovery_is_the_first_second_with_the_rate_of_before() {
        // Ten a second, none between 2 and 4 s.
        let ends: Vec<i64> = (0..80).map(|n| n * 100).filter(|at| !(2_000..4_000).contains(at)).collect();
        let ms = |from, until| recovery(&ends, 9.0, from, until).map(|time| time.as_millis());
        assert_eq!(ms(0, 8_000), Some(0));
        assert_eq!(ms(2_500, 8_000), Some(1_350));
        assert_eq!(ms(2_500, 4_500), None, "there is no such second yet");
        assert_eq!(recovery(&ends, 11.0, 0, 8_000), None);
    }
}
