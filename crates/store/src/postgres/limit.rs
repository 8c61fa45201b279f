//! Limit: what this server can do at most with the rows of a step, by the very statements of the writer and nothing else.
//!
//! A number of connections, each with a share of the workflows to itself; every batch loads and locks heads in one round
//! trip, and writes two events, head and variable a step with the commit in the second. Nothing is decided, nothing is
//! waited for, the arrays are made beforehand as far as they can be: the yardstick for the engine, not a rival.

use std::time::{Duration, Instant};

use tokio_postgres::types::ToSql;

use super::place::Place;
use super::session::{Purpose, Session, postgres};
use super::statements::{W, WRITER};
use crate::contract::StoreError;

/// What a bare loop took.
#[derive(Debug, Clone)]
pub struct Limit {
    /// Steps written, per second.
    pub steps_per_s: f64,
    /// How long each commit took.
    pub commits: Vec<Duration>,
}

/// Texts of the size that the engine writes: the two events of a step and a variable's value.
#[derive(Debug, Clone, Copy)]
pub struct Texts<'a> {
    /// The event that ends a step.
    pub completed: &'a str,
    /// The event that begins one.
    pub started: &'a str,
    /// A variable's value.
    pub value: &'a str,
}

/// Writes `steps` steps in batches of `batch`, on `connections` connections at a time, into a schema of their own at
/// `url`, which is dropped afterwards.
///
/// # Errors
/// [`StoreError`] when the server says no.
pub fn measure(
    url: &str,
    steps: usize,
    batch: usize,
    connections: usize,
    texts: Texts<'_>,
) -> Result<Limit, StoreError> {
    super::migrate(url)?;
    let measured = run(url, steps, batch, connections, texts);
    super::drop_schema(url)?;
    measured
}

fn run(url: &str, steps: usize, batch: usize, connections: usize, texts: Texts<'_>) -> Result<Limit, StoreError> {
    let place = Place::parse(url)?;
    let rounds = (steps / (batch * connections)).max(1);
    let mut shares = Vec::new();
    for share in 0..connections {
        shares.push(Share::begin(&place, share, batch, rounds)?);
    }
    let begin = Instant::now();
    let commits = std::thread::scope(|scope| {
        let threads: Vec<_> = shares.into_iter().map(|share| scope.spawn(move || share.run(rounds, texts))).collect();
        let mut commits = Vec::new();
        for thread in threads {
            commits.extend(thread.join().unwrap_or(Err(StoreError::Recovering))?);
        }
        Ok::<_, StoreError>(commits)
    })?;
    let written = (rounds * batch * connections) as f64;
    Ok(Limit { steps_per_s: written / begin.elapsed().as_secs_f64(), commits })
}

/// One connection with its workflows.
struct Share {
    runtime: tokio::runtime::Runtime,
    session: Session,
    /// Ten steps each: a new set of workflows every ten rounds.
    sets: Vec<Vec<i64>>,
}

impl Share {
    fn begin(place: &Place, share: usize, batch: usize, rounds: usize) -> Result<Self, StoreError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|source| {
            StoreError::File { doing: "start a runtime for", path: place.to_string().into(), source }
        })?;
        let count = rounds.div_ceil(10);
        let first = i64::try_from(share * count * batch).unwrap_or_default() + 1;
        let numbers: Vec<i64> = (first..).take(count * batch).collect();
        let sets: Vec<Vec<i64>> = numbers.chunks(batch).map(<[i64]>::to_vec).collect();
        let session = runtime.block_on(async {
            let session = Session::connect(place, &std::sync::Arc::default(), &WRITER, Purpose::Write).await?;
            session
                .client
                .query_typed(
                    &place.text(
                        "insert into {schema}.heads (namespace, workflow, seq, created_at, updated_at, visit, due, epoch,
                             boot, started_at, lease_ms, lease_until, step_deadline, priority, attempt, delivery, wake,
                             remote, status, step, token, worker, id, name)
                         select 1, n, 1, 1, 1, 1, 1, 1, 1, 1, 30000, 1, 1, 0, 1, 1, 0, false, 'running', 'step',
                             '\\x00112233445566778899aabbccddeeff', 'n1.b1.p12345', n::text, 'ten' from unnest($1) n",
                    ),
                    &[(&numbers, tokio_postgres::types::Type::INT8_ARRAY)],
                )
                .await
                .map_err(postgres("prepare a measurement"))?;
            Ok::<_, StoreError>(session)
        })?;
        Ok(Self { runtime, session, sets })
    }

    fn run(self, rounds: usize, texts: Texts<'_>) -> Result<Vec<Duration>, StoreError> {
        let Self { runtime, session, sets } = self;
        let doing = postgres("measure");
        let batch = sets.first().map_or(0, Vec::len);
        let ones = vec![1_i32; batch];
        let (long, short) = (vec![Some(1_796_234_455_123_i64); batch], vec![Some(1_i32); batch]);
        let (none, no_text) = (vec![None::<i64>; batch], vec![None::<&str>; batch]);
        let (kept, steps) = (vec!["running"; batch], vec![Some("step"); batch]);
        let tokens = vec![Some(&[7_u8; 16][..]); batch];
        let (workers, remotes, wakes) =
            (vec![Some("n1.b1.p12345"); batch], vec![Some(false); batch], vec![Some(0_i16); batch]);
        let due = vec![Some(1_i64); batch];
        let keys = vec!["result"; batch];
        let values = vec![texts.value; batch];
        let twice = [ones.clone(), ones.clone()].concat();
        let types = [vec!["step_completed"; batch], vec!["step_started"; batch]].concat();
        let payloads = [vec![texts.completed; batch], vec![texts.started; batch]].concat();
        let at = vec![1_796_234_455_123_i64; batch * 2];
        let none_named: (Vec<i32>, Vec<&str>) = Default::default();
        let nothing = 0_i32;
        let mut commits = Vec::with_capacity(rounds);
        for round in 0..rounds {
            let began = Instant::now();
            let numbers = &sets[round / 10];
            let seq = i64::try_from(round % 10).unwrap_or_default() * 2 + 2;
            runtime.block_on(async {
                let named: [&(dyn ToSql + Sync); 3] = [numbers, &none_named.0, &none_named.1];
                let count: [&(dyn ToSql + Sync); 1] = [&nothing];
                let (begun, moment, heads) = futures_util::join!(
                    session.begin(),
                    session.run(W::Moment as usize, &count),
                    session.run(W::Heads as usize, &named)
                );
                begun.map_err(&doing)?;
                moment.map_err(&doing)?;
                heads.map_err(&doing)?;
                let both = [numbers.clone(), numbers.clone()].concat();
                let seqs = [vec![seq; batch], vec![seq + 1; batch]].concat();
                let heads_at = vec![seq + 1; batch];
                let (revisions, one) = (vec![1_i64; batch], 1_i64);
                let events: [&(dyn ToSql + Sync); 7] = [&twice, &both, &seqs, &types, &twice, &at, &payloads];
                let updated: [&(dyn ToSql + Sync); 24] = [
                    numbers, &revisions, &heads_at, &long, &kept, &no_text, &steps, &long, &short, &short, &tokens,
                    &long, &workers, &long, &remotes, &long, &long, &long, &long, &no_text, &none, &wakes, &due, &one,
                ];
                let put: [&(dyn ToSql + Sync); 5] = [&ones, numbers, &keys, &values, &heads_at];
                let (events, heads, put, committed) = futures_util::join!(
                    session.run(W::InsertEvents as usize, &events),
                    session.run(W::UpdateHeads as usize, &updated),
                    session.run(W::PutVariables as usize, &put),
                    session.client.batch_execute("commit")
                );
                events.map_err(&doing)?;
                heads.map_err(&doing)?;
                put.map_err(&doing)?;
                committed.map_err(&doing)
            })?;
            commits.push(began.elapsed());
        }
        drop(session);
        Ok(commits)
    }
}
