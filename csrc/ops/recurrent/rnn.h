/* rnn.h -- declares the recurrent part of RNN, GRU and LSTM: what cannot be done for all steps at once (rnn_scan.c).
 *
 * z [steps, batch, gates * hidden] are the gates' inputs as far as they do not depend on earlier steps, and r [gates *
 * hidden, hidden] turns the previous state into the rest. `lengths` [batch] (int32, or absent) ends sequences early:
 * from there on the state stays, and y is 0.
 *
 *     RnnScan       z, r, h, lengths                          -> kept [steps, batch, hidden],     y, last h, previous h
 *     GruScan       z, r, h, lengths, bias [3 * hidden]       -> kept [steps, batch, 4 * hidden], y, last h, previous h
 *     LstmScan      z, r, h, lengths, c                       -> kept [steps, batch, 4 * hidden], y, last h, previous
 *                                                                h, last c, cells [steps, batch, hidden]
 *     RnnScanGrad   kept, r, lengths, dy, dh                  -> dz, dh
 *     GruScanGrad   kept, r, lengths, dy, dh, previous h      -> dz, dh, d (r h + bias)
 *     LstmScanGrad  kept, r, lengths, dy, dh, dc, cells, c    -> dz, dh, dc
 *
 * `kept` is what backward needs of the gates: h of RNN; z, r, n and R_n h + bias of GRU; i, o, f, g of LSTM. */
#ifndef ORT_OPS_RNN_H
#define ORT_OPS_RNN_H

#include "ops/op.h"

size_t workspace_scan(const node *n), workspace_scan_grad(const node *n); /* on any device */
size_t scan_cpu_workspace(const node *n), scan_grad_cpu_workspace(const node *n);
/* Where a gradient's kernel keeps result i: there, or in `work`, of workspace_scan_grad bytes, where not wanted. */
void *scan_grad_memory(const call *k, void *work, int i);
kernel_fn rnn_scan_cpu, gru_scan_cpu, lstm_scan_cpu, rnn_scan_grad_cpu, gru_scan_grad_cpu, lstm_scan_grad_cpu;

#endif
