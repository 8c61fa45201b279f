//! A real server on a real socket, asked by a real client.

mod site;

mod admission;
mod bulk;
mod control;
mod edges;
mod limits;
mod look;
mod signals;
mod slow;
mod stop;
mod telemetry;
