//! Hints: how a node that has work to spare lets the others know.
//!
//! A notification takes a lock that all of a database's notifying transactions share, so none goes with a batch: whatever
//! hints come within a moment are one notification, in a transaction of its own on a connection of its own. Who hears
//! looks for work a second earlier than he would have by himself; nothing depends on it. Behind a pooler, where nobody
//! can listen, there are none.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;
use tokio_postgres::AsyncMessage;

use super::learned::Learned;
use super::place::Place;
use super::session::{Purpose, Session, postgres};
use crate::contract::StoreError;

/// Hints that come within this time are one.
const APART: Duration = Duration::from_millis(20);
/// How long a lost connection is left alone before it is made anew.
const REST: Duration = Duration::from_secs(1);
/// How often a connection that nobody needed is asked whether it still lives, and how long it may take to say so.
const ALIVE: Duration = Duration::from_secs(5);

type Hear = Box<dyn Fn() + Send + Sync>;

/// What this node tells and hears.
#[derive(Default)]
pub(super) struct Hints {
    wanted: Notify,
    waiting: AtomicBool,
    hear: Mutex<Option<Hear>>,
}

impl std::fmt::Debug for Hints {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hints")
    }
}

impl Hints {
    /// Wants the others to look.
    pub(super) fn tell(&self) {
        if !self.waiting.swap(true, Ordering::Relaxed) {
            self.wanted.notify_one();
        }
    }

    /// Calls `hear` from now on.
    pub(super) fn on(&self, hear: Hear) {
        *self.hear.lock().unwrap_or_else(PoisonError::into_inner) = Some(hear);
    }

    fn heard(&self) {
        if let Some(hear) = &*self.hear.lock().unwrap_or_else(PoisonError::into_inner) {
            hear();
        }
    }
}

/// Tells and hears until the runtime ends. `boot` tells this node's own hints from the others'.
pub(super) async fn run(place: Place, learned: Arc<Learned>, hints: Arc<Hints>, boot: i64) {
    loop {
        match carry(&place, &learned, &hints, boot).await {
            Ok(()) => {
                tracing::info!("behind a pooler nobody can listen: nodes look for each other's work once a second");
                return;
            }
            Err(error) => tracing::debug!(%error, "hints are lost until there is a connection again"),
        }
        // Some may have been missed.
        hints.heard();
        tokio::time::sleep(REST).await;
    }
}

/// Carries hints on one connection. Ends well only where there can be none.
async fn carry(place: &Place, learned: &Arc<Learned>, hints: &Hints, boot: i64) -> Result<(), StoreError> {
    let mut session = Session::connect(place, learned, &[], Purpose::Listen).await?;
    let Some(mut told) = session.told.take().filter(|_| !session.is_pooled) else { return Ok(()) };
    let channel = format!("{}_hints", place.schema);
    let say = async |text: &str| match timeout(ALIVE, session.client.batch_execute(text)).await {
        _ if session.is_over() => Err(StoreError::Recovering),
        Ok(said) => said.map_err(postgres("listen for hints")),
        Err(_) => Err(StoreError::NoServer { tried: format!("no answer within {} s", ALIVE.as_secs()) }),
    };
    say(&format!("listen {channel}")).await?;
    let own = boot.to_string();
    loop {
        tokio::select! {
            message = told.recv() => match message {
                Some(AsyncMessage::Notification(hint)) if hint.payload() != own => hints.heard(),
                Some(_) => {}
                None => return Err(StoreError::Recovering),
            },
            () = hints.wanted.notified() => {
                tokio::time::sleep(APART).await;
                hints.waiting.store(false, Ordering::Relaxed);
                say(&format!("notify {channel}, '{boot}'")).await?;
            }
            () = tokio::time::sleep(ALIVE) => say("").await?,
        }
    }
}
