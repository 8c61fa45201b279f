//! Floors: from where on the queues of ready and due workflows are read while somebody holds an old snapshot.
//!
//! A row that leaves a queue stays in its index until no snapshot can see it. Whoever reads the queue from its beginning
//! walks over all that has left, and as long as an old snapshot is held that grows with every claim. So while one is,
//! this node remembers which queues there are and how far each was found empty, and reads no others and not from further
//! below.
//!
//! Nothing rests on it but how soon something is found. What this node puts in below a floor lowers it. What other nodes
//! put in is found by a look at all queues, beside the claims, within a second or as long as that look takes ten times
//! over; rows that come in late by no more than [`SLACK_MS`], which is most, are not below a floor to begin with.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::reader::Pool;
use crate::contract::StoreError;

/// Floors are used when the oldest snapshot is older than so many transactions: a few milliseconds of walking.
const HELD_FROM: u64 = 4_096;
/// A floor stays so far below what was found, in milliseconds: ranks and due times of rows that come in meanwhile are at
/// most a little older.
const SLACK_MS: i64 = 250;
/// How often it is asked how old the oldest snapshot is.
const ASKS: Duration = Duration::from_secs(4);
/// How soon after one look at all queues the next follows, and how many times longer than it took.
const LOOKS: (Duration, u32) = (Duration::from_secs(1), 10);
/// How many queues are remembered.
const QUEUES_MAX: usize = 4_096;

/// Rows in one order.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Queue {
    /// Ready ones of a namespace, a definition and a step, by rank.
    Ready(i32, String, String),
    /// Waiting or running ones of a namespace, by the time when that is over.
    Timed(i32, i16),
}

/// How far each queue was found empty.
#[derive(Debug, Default)]
pub(super) struct Floors {
    held: AtomicBool,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    low: HashMap<Queue, i64>,
    /// All queues of ready rows are in it.
    all: bool,
    /// The lowest that has come into each queue since a read of the queues began that is not over.
    reads: HashMap<u64, HashMap<Queue, i64>>,
    last: u64,
}

/// A read of the queues under way. Where it fails, nothing was found.
#[derive(Debug)]
pub(super) struct Read {
    floors: Arc<Floors>,
    number: u64,
}

impl Read {
    /// Ends it: in each of these queues nothing was found below.
    pub(super) fn found(self, lowest: HashMap<Queue, i64>) {
        let mut inner = self.floors.inner();
        let Some(came_in) = inner.reads.remove(&self.number) else { return };
        inner.make_room(lowest.len());
        for (queue, lowest) in lowest {
            let safe = lowest.saturating_sub(SLACK_MS);
            let safe = came_in.get(&queue).map_or(safe, |came_in| safe.min(*came_in));
            let low = inner.low.entry(queue).or_insert(safe);
            *low = safe.max(*low);
        }
    }

    /// Ends a look at all queues: these are those of ready rows, and what was found below the floors of the others.
    fn found_all(self, lowest: Vec<(Queue, i64)>) {
        let mut inner = self.floors.inner();
        let Some(came_in) = inner.reads.remove(&self.number) else { return };
        inner.make_room(lowest.len() + came_in.len());
        inner.all = inner.low.len() + lowest.len() + came_in.len() <= QUEUES_MAX;
        for (queue, at) in lowest.into_iter().chain(came_in) {
            inner.lower(queue, at);
        }
    }
}

impl Inner {
    /// Forgets everything where there would be too much.
    fn make_room(&mut self, more: usize) {
        if self.low.len() + more > QUEUES_MAX {
            self.low.clear();
            self.all = false;
        }
    }

    fn lower(&mut self, queue: Queue, at: i64) {
        let low = self.low.entry(queue).or_insert(at);
        *low = at.min(*low);
    }
}

impl Drop for Read {
    fn drop(&mut self) {
        self.floors.inner().reads.remove(&self.number);
    }
}

impl Floors {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True while they are used.
    pub(super) fn are_used(&self) -> bool {
        self.held.load(Ordering::Relaxed)
    }

    /// Uses them from now on, or not any more.
    fn hold(&self, held: bool) {
        if self.held.swap(held, Ordering::Relaxed) && !held {
            self.clear();
        }
    }

    /// Forgets everything, also what reads under way will find.
    pub(super) fn clear(&self) {
        let mut inner = self.inner();
        *inner = Inner { last: inner.last, ..Inner::default() };
    }

    /// Begins a read of the queues, where floors are used.
    pub(super) fn begin(self: &Arc<Self>) -> Option<Read> {
        if !self.are_used() {
            return None;
        }
        let mut inner = self.inner();
        inner.last += 1;
        let number = inner.last;
        inner.reads.insert(number, HashMap::new());
        drop(inner);
        Some(Read { floors: self.clone(), number })
    }

    /// Notes what has come into the queues.
    pub(super) fn came_in(&self, rows: impl Iterator<Item = (Queue, i64)>) {
        if !self.are_used() {
            return;
        }
        let mut inner = self.inner();
        for (queue, at) in rows {
            for came_in in inner.reads.values_mut() {
                let least = came_in.entry(queue.clone()).or_insert(at);
                *least = at.min(*least);
            }
            if inner.all || inner.low.contains_key(&queue) {
                inner.make_room(1);
                inner.lower(queue, at);
            }
        }
    }

    /// The floors of ready rows of a namespace, by definition and step, and whether there are no others.
    pub(super) fn ready(&self, namespace: i32) -> (Vec<(String, String, i64)>, bool) {
        if !self.are_used() {
            return (Vec::new(), false);
        }
        let inner = self.inner();
        let floors = inner.low.iter().filter_map(|(queue, low)| match queue {
            Queue::Ready(of, name, step) if *of == namespace => Some((name.clone(), step.clone(), *low)),
            _ => None,
        });
        (floors.collect(), inner.all)
    }

    /// The floors of due rows, as columns: namespaces, kinds and times.
    pub(super) fn timed(&self) -> TimedFloors {
        let mut floors = TimedFloors::default();
        if !self.are_used() {
            return floors;
        }
        for (queue, low) in &self.inner().low {
            if let Queue::Timed(namespace, wake) = queue {
                floors.0.push(*namespace);
                floors.1.push(*wake);
                floors.2.push(*low);
            }
        }
        floors
    }
}

/// Namespaces, kinds and due times.
pub(super) type TimedFloors = (Vec<i32>, Vec<i16>, Vec<i64>);

/// Watches for old snapshots, and looks at all queues while one is held, until the runtime ends.
pub(super) async fn run(pool: Arc<Pool>, floors: Arc<Floors>) {
    let mut pause = ASKS;
    loop {
        tokio::time::sleep(pause).await;
        pause = match look(&pool, &floors).await {
            Ok(Some(took)) => (took * LOOKS.1).max(LOOKS.0),
            Ok(None) => ASKS,
            Err(error) => {
                tracing::debug!(%error, "nobody can tell whether an old snapshot is held");
                floors.hold(false);
                ASKS
            }
        };
    }
}

/// Answers how long the look at all queues took, if there was one.
async fn look(pool: &Pool, floors: &Arc<Floors>) -> Result<Option<Duration>, StoreError> {
    let oldest = pool.oldest_snapshot().await?;
    let held = oldest.transactions >= HELD_FROM;
    if held && !floors.are_used() {
        tracing::warn!(
            transactions = oldest.transactions,
            "somebody holds an old snapshot: what leaves the queues stays in their indexes until it is gone"
        );
    }
    floors.hold(held);
    if !held {
        return Ok(None);
    }
    let began = Instant::now();
    if let Some(read) = floors.begin() {
        let lowest = pool.queues(floors.timed()).await?;
        read.found_all(lowest);
    }
    Ok(Some(began.elapsed()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue() -> Queue {
        Queue::Ready(1, "flow".to_owned(), "start".to_owned())
    }

    fn used() -> Arc<Floors> {
        let floors = Arc::<Floors>::default();
        floors.hold(true);
        floors
    }

    fn low(floors: &Floors) -> Option<i64> {
        floors.ready(1).0.first().map(|(_, _, low)| *low)
    }

    fn read(floors: &Arc<Floors>, lowest: i64) {
        floors.begin().expect("they are used").found([(queue(), lowest)].into());
    }

    #[test]
    fn a_floor_follows_what_is_found_and_what_comes_in_lowers_it() {
        let floors = used();
        assert_eq!(low(&floors), None);
        read(&floors, 10_000);
        assert_eq!(low(&floors), Some(10_000 - SLACK_MS));
        read(&floors, 10_100);
        assert_eq!(low(&floors), Some(10_100 - SLACK_MS));
        floors.came_in([(queue(), 20_000), (Queue::Timed(1, 0), 5)].into_iter());
        assert_eq!(low(&floors), Some(10_100 - SLACK_MS), "it came in above");
        floors.came_in([(queue(), 3_000), (queue(), 4_000)].into_iter());
        assert_eq!(low(&floors), Some(3_000));
        read(&floors, 3_000);
        assert_eq!(low(&floors), Some(3_000), "it is still there");
        read(&floors, 12_000);
        assert_eq!(low(&floors), Some(12_000 - SLACK_MS));
        assert_eq!(floors.ready(1), (vec![("flow".to_owned(), "start".to_owned(), 11_750)], false));
        assert_eq!(floors.ready(2), (vec![], false), "of another namespace");
    }

    /// A read that began before does not see it, whatever it finds.
    #[test]
    fn what_comes_in_during_a_read_is_not_passed_over() {
        let floors = used();
        let (early, other) = (floors.begin().expect("it reads"), floors.begin().expect("it reads"));
        floors.came_in([(queue(), 7_000)].into_iter());
        early.found([(queue(), 10_000)].into());
        assert_eq!(low(&floors), Some(7_000));
        other.found([(queue(), 10_000)].into());
        assert_eq!(low(&floors), Some(7_000));
        read(&floors, 10_000);
        assert_eq!(low(&floors), Some(10_000 - SLACK_MS), "a later one has seen it");
        drop(floors.begin());
        assert!(floors.inner().reads.is_empty(), "one that failed is over too");
    }

    #[test]
    fn after_a_look_at_all_queues_there_are_no_others_but_what_this_node_adds() {
        let queue = |step: &str| Queue::Ready(1, "flow".to_owned(), step.to_owned());
        let floors = used();
        let told = |floors: &Arc<Floors>| {
            let (mut ready, all) = floors.ready(1);
            ready.sort();
            (ready.into_iter().map(|(_, step, low)| format!("{step} {low}")).collect::<Vec<_>>().join(", "), all)
        };
        let told = || told(&floors);
        floors.came_in([(queue("early"), 1)].into_iter());
        assert_eq!(told(), (String::new(), false));
        let look = floors.begin().expect("it looks");
        floors.came_in([(queue("meanwhile"), 900), (queue("meanwhile"), 800)].into_iter());
        look.found_all(vec![(queue("early"), 1), (queue("a"), 500), (Queue::Timed(1, 0), 3)]);
        assert_eq!(told(), ("a 500, early 1, meanwhile 800".to_owned(), true));
        assert_eq!(floors.timed(), (vec![1], vec![0], vec![3]));
        floors.begin().expect("it reads").found([(queue("a"), 5_000)].into());
        floors.came_in([(queue("new"), 7)].into_iter());
        assert_eq!(told(), ("a 4750, early 1, meanwhile 800, new 7".to_owned(), true));
        let look = floors.begin().expect("it looks");
        look.found_all(vec![(queue("a"), 600)]);
        assert_eq!(told(), ("a 600, early 1, meanwhile 800, new 7".to_owned(), true), "another node put it in");
        floors.clear();
        assert_eq!(told(), (String::new(), false));
    }

    #[test]
    fn without_an_old_snapshot_there_are_none() {
        let floors = Arc::<Floors>::default();
        assert!(floors.begin().is_none());
        floors.hold(true);
        let lost = floors.begin().expect("it reads");
        read(&floors, 1);
        floors.hold(false);
        assert!(low(&floors).is_none() && floors.begin().is_none());
        floors.hold(true);
        lost.found([(queue(), 9)].into());
        assert_eq!(low(&floors), None, "what it found is of a time that is over");
    }

    #[test]
    fn no_more_queues_are_remembered_than_there_is_room_for() {
        let floors = used();
        for n in 0..i32::try_from(QUEUES_MAX * 2 + 5).expect("it is small") {
            floors.begin().expect("they are used").found([(Queue::Timed(n, 0), 1)].into());
        }
        assert!(floors.inner().low.len() <= QUEUES_MAX);
        let many = (0..).map(|n| (Queue::Timed(n, 1), 1)).take(QUEUES_MAX + 1);
        floors.begin().expect("they are used").found_all(many.clone().collect());
        assert!(!floors.inner().all, "not all of them are remembered");
        floors.begin().expect("they are used").found_all(many.take(QUEUES_MAX).collect());
        assert!(floors.inner().all);
        floors.came_in([(queue(), 1)].into_iter());
        assert!(!floors.inner().all && floors.inner().low.len() <= QUEUES_MAX);
    }
}
